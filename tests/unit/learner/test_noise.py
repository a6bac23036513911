from __future__ import annotations

import torch

from drafter.batch import pack
from learner.noise import noisy


def test_noise_of_a_request_does_not_depend_on_the_batch_around_it(make_request, spec):
    requests = [make_request(f"r{n}", first=n, total=12 + n) for n in range(3)]

    def noised(*chosen, seed: str = "0 0"):
        batch = pack([request.rows for request in chosen], 3)
        keys = [request.key for request in chosen]
        return noisy(batch, keys, num_aux=len(spec.aux_layer_ids), share=0.1, seed=seed).aux_TX

    together = noised(*requests)
    assert torch.equal(together, torch.cat([noised(request) for request in requests]))
    assert not torch.equal(together, noised(*requests, seed="0 1"))


def test_noise_is_a_share_of_each_layers_size(make_request, spec):
    request = make_request(total=400)
    batch = pack([request.rows], 3)
    num_aux = len(spec.aux_layer_ids)
    plain, noised = (
        noisy(batch, [request.key], num_aux=num_aux, share=share, seed="0").aux_TX.view(400, num_aux, -1)
        for share in (0.0, 0.1)
    )
    found = (noised - plain).square().mean((0, 2)).sqrt() / plain.square().mean((0, 2)).sqrt()
    torch.testing.assert_close(found, torch.full_like(found, 0.1), rtol=0.1, atol=0.0)
