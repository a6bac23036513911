"""The stock CPU faults, each with a live test that fails without its mend, and one that tells when vLLM mended it itself."""

from __future__ import annotations

import inspect
import math
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from live_engine import LiveEngine
from targets import greedy, make_moved
from transformers import AutoModelForCausalLM
from vllm.compilation import decorators
from vllm.config import VllmConfig
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

from server.engine import mends
from server.engine.plugin import register

PROMPT = "the distribution of what follows "


@torch.inference_mode()
def target_distribution(target: Path, ids: list[int], temperature: float) -> torch.Tensor:
    """Next-token probabilities [V] of the plain target."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    return torch.softmax(model(torch.tensor([ids])).logits[0, -1] / temperature, dim=-1)


def chi_square(counts: Counter[int], probabilities: torch.Tensor, num_samples: int) -> tuple[float, int]:
    """(statistic, degrees of freedom) over tokens expected at least 5 times; the rest is one bin."""
    expected = (probabilities.double() * num_samples).tolist()
    kept = [token for token, count in enumerate(expected) if count >= 5.0]
    bins = [(counts[token], expected[token]) for token in kept]
    bins.append((num_samples - sum(seen for seen, _ in bins), num_samples - sum(want for _, want in bins)))
    return sum((seen - want) ** 2 / want for seen, want in bins if want > 0.5), len(bins) - 1


def bound(degrees: int) -> float:
    """Chi-square quantile for a one-in-a-million false alarm (Wilson-Hilferty)."""
    z = 4.75
    return degrees * (1 - 2 / (9 * degrees) + z * math.sqrt(2 / (9 * degrees))) ** 3


def test_sampling_under_speculation_follows_the_targets_distribution(tiny_engine: LiveEngine) -> None:
    """Token by token, given the tokens before: 2,000 continuations of three tokens, temperatures mixed within the batch."""
    num_samples = 2000
    for temperature in (1.0, 0.7):
        answer = tiny_engine.ok(
            "/v1/completions",
            {
                "model": tiny_engine.model,
                "prompt": [PROMPT] * 4,
                "n": num_samples // 4,
                "max_tokens": 3,
                "temperature": temperature,
                "ignore_eos": True,
                "return_token_ids": True,
            },
        )
        prompt_ids = answer["choices"][0]["prompt_token_ids"]
        samples = [tuple(choice["token_ids"]) for choice in answer["choices"]]
        prefixes = Counter(sample[:depth] for sample in samples for depth in range(3))
        checked = 0
        for prefix, count in prefixes.most_common(6):
            following = Counter(sample[len(prefix)] for sample in samples if sample[: len(prefix)] == prefix)
            probabilities = target_distribution(tiny_engine.target_dir, prompt_ids + list(prefix), temperature)
            statistic, degrees = chi_square(following, probabilities, count)
            if degrees:
                assert statistic < bound(degrees), (temperature, prefix, statistic, degrees)
                checked += degrees
        assert checked >= 10
    tiny_engine.settle()
    spans = [span for item in tiny_engine.listener.captured for span in item.message.spans if span.temperature == 1.0]
    assert sum(span.num_accepted for span in spans) > 50  # the test would be empty if nothing was ever accepted
    assert sum(span.num_proposed - span.num_accepted for span in spans) > 50


def test_mixed_temperatures_in_one_batch_do_not_mix(tiny_engine: LiveEngine) -> None:
    """Greedy requests beside hot ones stay greedy."""
    alone = tiny_engine.complete(PROMPT, max_tokens=48)
    body = {"max_tokens": 48, "ignore_eos": True}
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(tiny_engine.complete, PROMPT, temperature=0.0 if i % 2 else 1.3, **body) for i in range(8)]
        crowd = [future.result() for future in futures]
    assert all(completion.token_ids == alone.token_ids for completion in crowd[1::2])


def test_a_seeded_request_with_a_chunked_prompt_is_served_and_reproducible(tiny_engine: LiveEngine) -> None:
    prompt = "".join(chr(97 + i % 19) for i in range(300))  # two of them fit without preemption
    first = tiny_engine.complete_all([prompt, prompt[::-1]], seed=11, temperature=1.0)
    second = tiny_engine.complete_all([prompt, prompt[::-1]], seed=11, temperature=1.0, cache_salt="again")
    assert [completion.token_ids for completion in first] == [completion.token_ids for completion in second]
    assert tiny_engine.call("/health")[0] == 200


def test_top_k_alone_is_served_where_nothing_is_proposed(tiny_engine: LiveEngine) -> None:
    """The last token of an answer is drawn without a proposal; with `top_k` 1 the text is the greedy one."""
    greedy_ids = tiny_engine.complete(PROMPT, max_tokens=8).token_ids
    for max_tokens in (1, 2, 8):
        completion = tiny_engine.complete(PROMPT, max_tokens=max_tokens, temperature=1.0, top_k=1)
        assert completion.token_ids == greedy_ids[:max_tokens]


def test_the_stock_top_k_still_fails_on_no_rows() -> None:
    """When this fails, vLLM has mended it: remove the mend and this test."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    with pytest.raises(RuntimeError, match=r"max\(\)"):
        apply_top_k_top_p_pytorch(torch.empty(0, 8), torch.empty(0, dtype=torch.int32), None, allow_cpu_sync=True)


def test_a_target_update_reaches_the_tied_head(tiny_engine: LiveEngine, tiny_target: Path, tmp_path: Path) -> None:
    """Greedy text after the update equals a plain forward of the new weights, and after the way back that of the old."""
    new_target = make_moved(tiny_target, tmp_path / "new", seed=5)
    digest = tiny_engine.ok("/paceline/digest")["target"]
    ids = tiny_engine.complete(PROMPT).prompt_ids
    try:
        for version, directory in ((1, new_target), (2, tiny_target)):
            tiny_engine.rpc("probe_update_target", version, str(directory))
            token_ids = tiny_engine.complete(PROMPT, max_tokens=16, cache_salt=f"target-{version}").token_ids
            assert token_ids == greedy(directory, ids, 16)
    finally:
        tiny_engine.rpc("probe_update_target", 0, str(tiny_target))
    assert tiny_engine.ok("/paceline/digest")["target"] == digest
    assert greedy(new_target, ids, 16) != greedy(tiny_target, ids, 16)


def test_what_the_cpu_compiled_is_loaded_with_the_mend_and_not_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is loaded without, vLLM has mended it: remove the mend and this test."""
    file = str(tmp_path / "model")
    torch.compile(doubled_and_more, fullgraph=True).aot_compile(((torch.zeros(4),), {})).save_compiled_function(file)
    config = VllmConfig()
    model = SimpleNamespace(
        vllm_config=config, compilation_config=config.compilation_config, forward=doubled_and_more, _is_encoder=False
    )
    stock = inspect.unwrap(decorators._try_load_aot_compiled_fn)
    monkeypatch.setattr(decorators, "_try_load_aot_compiled_fn", stock)
    assert stock(model, file) is None
    mends.mend_loading_of_compiled_models()
    loaded = decorators._try_load_aot_compiled_fn(model, file)
    assert loaded(torch.arange(4.0)).tolist() == [1.0, 3.0, 5.0, 7.0]


def looks_a_pause(wait: Callable[[Any], None]) -> float:
    """How often a reader that has waited for a while looks for its answer, in the time of one of the mend's pauses."""
    started_at_s = time.monotonic()
    reader = SimpleNamespace(is_reader=True, last_read=started_at_s - 2 * mends._SPIN_S, busy_loop_s=60.0)
    looks = 0
    while time.monotonic() < started_at_s + 0.2:
        wait(reader)
        looks += 1
    return looks * mends._PAUSE_S / (time.monotonic() - started_at_s)


def test_who_waits_for_an_answer_leaves_the_processor_to_others() -> None:
    register()
    assert looks_a_pause(SpinCondition.wait) <= 1.0


def test_the_stock_wait_still_takes_a_whole_processor() -> None:
    """When this fails, vLLM has mended it: remove the mend and this test."""
    assert looks_a_pause(inspect.unwrap(SpinCondition.wait)) > 3.0


def doubled_and_more(x: torch.Tensor) -> torch.Tensor:
    return 2 * x + 1


def test_the_mended_expansion_repeats_each_value_for_its_tokens() -> None:
    temperature = torch.tensor([0.0, 0.7, 1.3])
    expanded = mends.expand_batch_to_tokens(temperature, torch.tensor([2, 2, 5]), 5, replace_from=0, replace_to=1)
    assert expanded.tolist() == [1.0, 1.0, *[temperature[2].item()] * 3]


def test_the_stock_expansion_is_still_broken() -> None:
    """When this fails, vLLM has mended it: remove the mend and this test."""
    from vllm.utils import cpu_triton_utils

    output = torch.full((4,), -7.0)
    kernel = cpu_triton_utils._expand_kernel_impl
    kernel(output, torch.tensor([0.5, 0.25]), torch.tensor([2, 4], dtype=torch.int32), 0, 1, MAX_NUM_TOKENS=4)
    assert output.tolist() == [-7.0] * 4
