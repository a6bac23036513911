from __future__ import annotations

import json

import pytest
import torch

from drafter.vocabulary import (
    WANTED_COVERAGE,
    DraftVocabulary,
    SeenTokens,
    better_vocabulary,
    choose_vocabulary,
    control_token_ids,
    coverage,
    wanted_size,
)
from wire.errors import ArtifactError, ConfigError


def test_frequency_decides_then_lowest_ids_fill_up():
    counts = torch.zeros(20)
    counts[15], counts[11] = 5, 2
    assert choose_vocabulary(counts, [], 4).ids_U.tolist() == [0, 1, 11, 15]


def test_control_tokens_are_always_in():
    counts = torch.arange(20.0)
    assert choose_vocabulary(counts, [0, 2], 4).ids_U.tolist() == [0, 2, 18, 19]


def test_choice_is_deterministic_under_ties():
    counts = torch.ones(100)
    assert choose_vocabulary(counts, [99], 10).sha256 == choose_vocabulary(counts.clone(), [99], 10).sha256


def busy_and_quiet() -> list[torch.Tensor]:
    """A domain with a hundred times the traffic of another one, both of Zipf's kind, on other tokens."""
    zipf = 1000.0 / torch.arange(1, 101)
    return [torch.cat([zipf * 100, torch.zeros(100)]).round(), torch.cat([torch.zeros(100), zipf]).round()]


def seen(domains: list[torch.Tensor]) -> list[SeenTokens]:
    """As if all had been said by many requests."""
    return [SeenTokens(counts_V, torch.zeros_like(counts_V)) for counts_V in domains]


def test_a_quiet_domain_is_covered_as_well_as_a_busy_one():
    domains = busy_and_quiet()
    enough = choose_vocabulary(sum(domains), [], wanted_size([], seen(domains), 200), domains)
    assert min(coverage(counts, enough) for counts in domains) >= WANTED_COVERAGE
    too_small = choose_vocabulary(sum(domains), [], 80, domains)
    busy, quiet = (coverage(counts, too_small) for counts in domains)
    assert busy == pytest.approx(quiet, abs=0.01)
    assert coverage(domains[1], choose_vocabulary(sum(domains), [], 80)) < quiet - 0.2  # by count alone it has little


def test_the_wanted_size_is_the_smallest_that_covers_every_domain():
    domains = busy_and_quiet()
    fewest = [
        next(k for k in range(201) if counts.sort(descending=True).values[:k].sum() >= WANTED_COVERAGE * counts.sum())
        for counts in domains
    ]
    assert wanted_size([], seen(domains), 200) == sum(fewest)
    assert wanted_size([0, 199], [], 200) == 2


def bursts(generator: torch.Generator, chances_V: torch.Tensor) -> torch.Tensor:
    """The tokens of one request: every other one was said before in it."""
    tokens = torch.multinomial(chances_V, 200, replacement=True, generator=generator).tolist()
    for number in range(1, 200, 2):
        tokens[number] = tokens[int(torch.randint(number, (1,), generator=generator))]
    return torch.tensor(tokens)


@pytest.mark.parametrize("num_requests", [20, 100])
def test_tokens_not_seen_yet_count_by_their_expected_share(num_requests):
    """Token chances as a corpus has them, ids only roughly by frequency, rare tokens in bursts: the truth is known."""
    size = 5000
    generator = torch.Generator().manual_seed(num_requests)
    zipf = 1.0 / torch.arange(1, size + 1)
    chances_V = zipf[torch.argsort(torch.arange(size) * (0.5 + torch.rand(size, generator=generator)))]
    chances_V /= chances_V.sum()
    requests = [bursts(generator, chances_V) for _ in range(num_requests)]
    counts_V = torch.bincount(torch.cat(requests), minlength=size).float()
    said_by_V = torch.bincount(torch.cat([request.unique() for request in requests]), minlength=size)
    tokens = SeenTokens(counts_V, torch.where(said_by_V == 1, counts_V, 0))
    assert tokens.missing_share == pytest.approx(float(chances_V[counts_V == 0].sum()), rel=0.1)
    wanted = wanted_size([], [tokens], size)
    covered = float(chances_V[choose_vocabulary(counts_V, [], wanted, [counts_V]).ids_U].sum())
    assert covered == pytest.approx(WANTED_COVERAGE, abs=0.01)
    assert wanted > 1.5 * wanted_size([], seen([counts_V]), size)


def test_no_domain_pays_for_what_all_together_gain():
    domains = [torch.tensor([9.0, 0, 0, 0]), torch.tensor([0.0, 1, 0, 0])]
    present = DraftVocabulary(torch.tensor([0, 1]), 4)
    counts = torch.tensor([9.0, 1.0, 5.0, 0.0])
    assert choose_vocabulary(counts, [], 2).ids_U.tolist() == [0, 2]
    assert better_vocabulary(counts, [], present, 0.01, domains) is None
    returning = better_vocabulary(counts, [], DraftVocabulary(torch.tensor([0, 2]), 4), 0.01, domains)
    assert returning is not None
    assert returning.ids_U.tolist() == [0, 1]


def test_coverage_counts_tokens_not_types():
    vocabulary = DraftVocabulary(torch.tensor([1, 2]), 5)
    assert coverage(torch.tensor([0.0, 3.0, 0.0, 1.0, 0.0]), vocabulary) == 0.75
    assert coverage(torch.zeros(5), vocabulary) == 1.0


def test_offsets_round_trip_as_vllm_reads_them():
    vocabulary = DraftVocabulary(torch.tensor([1, 4, 9]), 12)
    assert vocabulary.offsets_U.tolist() == [1, 3, 7]
    assert DraftVocabulary.from_offsets(vocabulary.offsets_U, 12).ids_U.tolist() == [1, 4, 9]
    assert vocabulary.draft_ids_V.tolist() == [-1, 0, -1, -1, 1, -1, -1, -1, -1, 2, -1, -1]


@pytest.mark.parametrize("ids", [[1, 1], [-1, 2], [3, 12]])
def test_impossible_ids_are_refused(ids):
    with pytest.raises(ArtifactError, match="distinct"):
        DraftVocabulary(torch.tensor(ids), 12)


def test_a_vocabulary_larger_than_the_targets_is_refused():
    with pytest.raises(ConfigError, match="does not fit"):
        choose_vocabulary(torch.zeros(4), [], 5)


def test_control_tokens_come_from_config_and_chat_template(target_dir):
    (target_dir / "generation_config.json").write_text(json.dumps({"eos_token_id": [60, 61]}))
    tokens = [{"id": 1, "content": "<|im_start|>", "special": True}, {"id": 5, "content": "<unused>", "special": True}]
    (target_dir / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    (target_dir / "chat_template.jinja").write_text("<|im_start|>{{ role }}")
    assert control_token_ids(target_dir) == [1, 60, 61]
