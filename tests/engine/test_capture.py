"""What the capture says is what the engine did: ids, positions, counts, gaps, opt-outs."""

from __future__ import annotations

import urllib.request
from collections import Counter

from live_engine import Completion, LiveEngine

PROMPTS = [f"def function_{i}(x):\n    return" for i in range(6)]


def test_captured_tokens_reproduce_the_completion(tiny_engine: LiveEngine) -> None:
    completions = tiny_engine.complete_all(PROMPTS)
    tiny_engine.settle()
    for completion in completions:
        seen = tiny_engine.tokens_by_position(completion)
        first = min(seen)
        assert [seen[position] for position in range(first, len(completion.ids))] == completion.ids[first:]


def test_proposed_and_accepted_counts_equal_vllms_own(tiny_engine: LiveEngine) -> None:
    completions = tiny_engine.complete_all(PROMPTS, max_tokens=40)
    tiny_engine.settle()
    num_accepted = 0
    for completion in completions:
        spans = [span for _, span in tiny_engine.spans_of(completion) if span.num_proposed]
        theirs = completion.metrics["speculative_decoding"]
        assert [span.num_proposed for span in spans] == theirs["per_step_drafted"]
        assert [span.num_accepted for span in spans] == theirs["per_step_accepted"]
        num_accepted += sum(span.num_accepted for span in spans)
    assert num_accepted > 0


def test_counters_cover_every_request_also_at_rate_zero(tiny_engine: LiveEngine) -> None:
    tiny_engine.settle()
    tiny_engine.listener.clear()
    tiny_engine.ok("/paceline/capture", {"rate": 0.0})
    try:
        completions = tiny_engine.complete_all(PROMPTS, vllm_xargs={"paceline_domain": "uncaptured", "paceline_tenant": "t1"})
    finally:
        tiny_engine.ok("/paceline/capture", {"rate": 1.0})
    tiny_engine.settle()
    assert not tiny_engine.listener.captured
    theirs = [completion.metrics["speculative_decoding"] for completion in completions]
    counts = [count for count in tiny_engine.fresh_stats().acceptance if count.domain == "uncaptured"]
    # The engine stops at max_tokens within a step; its own metric and ours both count the whole step.
    assert sum(count.num_verify_steps for count in counts) == sum(len(metric["per_step_drafted"]) for metric in theirs)
    assert sum(sum(count.accepted_per_position) for count in counts) == sum(
        sum(metric["per_step_accepted"]) for metric in theirs
    )
    assert {count.tenant for count in counts} == {"t1"}


def test_a_request_that_opts_out_is_not_captured(tiny_engine: LiveEngine) -> None:
    completion = tiny_engine.complete(PROMPTS[0], vllm_xargs={"paceline_capture": 0})
    other = tiny_engine.complete(PROMPTS[0])
    tiny_engine.settle()
    assert not tiny_engine.spans_of(completion)
    assert tiny_engine.spans_of(other)


def test_a_cached_prefix_leaves_a_gap_and_nothing_else(tiny_engine: LiveEngine) -> None:
    prompt = "cached prefix " * 12
    first = tiny_engine.complete(prompt)
    second = tiny_engine.complete(prompt)
    tiny_engine.settle()
    assert second.token_ids == first.token_ids
    begin_first, begin_second = (min(tiny_engine.tokens_by_position(completion)) for completion in (first, second))
    assert begin_first == 0
    assert begin_second >= 32
    seen = tiny_engine.tokens_by_position(second)
    assert sorted(seen)[-1] - begin_second + 1 == len(seen)
    keys = {span.prompt_key for completion in (first, second) for _, span in tiny_engine.spans_of(completion)}
    assert len(keys) == 1
    assert keys != {""}


def test_a_prompt_in_chunks_is_captured_whole_and_once(tiny_engine: LiveEngine) -> None:
    prompt = "".join(chr(97 + i % 23) for i in range(400))
    completion = tiny_engine.complete(prompt)
    tiny_engine.settle()
    spans = [span for _, span in tiny_engine.spans_of(completion)]
    chunks = [span for span in spans if not span.num_proposed]
    assert len(chunks) >= 3
    assert not any(chunk.emitted_ids for chunk in chunks[:-1])
    assert sum(chunk.num_rows for chunk in chunks) == len(completion.prompt_ids)
    seen = tiny_engine.tokens_by_position(completion)
    assert [seen[position] for position in range(len(completion.ids))] == completion.ids


def test_preempted_requests_are_recomputed_and_reported_without_contradiction(tiny_engine: LiveEngine) -> None:
    before = preemptions(tiny_engine)
    prompts = [f"{i} preempted prompt number {i} " * 3 for i in range(8)]
    crowded: list[Completion] = []
    for _ in range(10):  # whether they crowd one another depends on when each of them arrives
        crowded = tiny_engine.complete_all(prompts, max_tokens=160)
        if preemptions(tiny_engine) > before:
            break
    assert preemptions(tiny_engine) > before
    alone = [tiny_engine.complete(prompt, max_tokens=160) for prompt in prompts]
    tiny_engine.settle()
    for completion, reference in zip(crowded, alone, strict=True):
        assert completion.token_ids == reference.token_ids
        seen = tiny_engine.tokens_by_position(completion)
        first = min(seen)
        assert [seen[position] for position in range(first, len(completion.ids))] == completion.ids[first:]


def preemptions(engine: LiveEngine) -> float:
    text = urllib.request.urlopen(engine.url + "/metrics").read().decode()
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith("vllm:num_preemptions_total"))


def test_structured_output_is_captured_and_obeys_its_grammar(tiny_engine: LiveEngine) -> None:
    completion = tiny_engine.complete("digits: ", structured_outputs={"regex": "[0-9]{12}"}, ignore_eos=False, max_tokens=20)
    tiny_engine.settle()
    assert len(completion.text) == 12
    assert completion.text.isdigit()
    seen = tiny_engine.tokens_by_position(completion)
    assert [seen[position] for position in range(len(completion.prompt_ids), len(completion.ids) - 1)] == completion.token_ids[
        :-1
    ]


def test_the_end_of_a_request_is_reported_once(tiny_engine: LiveEngine) -> None:
    completions = tiny_engine.complete_all(PROMPTS)
    tiny_engine.settle()
    finished = Counter(i for captured in list(tiny_engine.listener.captured) for i in captured.message.finished_ids)
    for completion in completions:
        (identity,) = {span.request_id for _, span in tiny_engine.spans_of(completion)}
        assert finished[identity] == 1


def test_requests_that_share_an_id_are_kept_apart(tiny_engine: LiveEngine) -> None:
    first, second = tiny_engine.complete_all(["def apple(x):", "def pear(y, z):"], request_id="the-client-repeats-itself")
    tiny_engine.settle()
    by_request: dict[str, dict[int, int]] = {}
    for _, span in tiny_engine.spans_of(first):
        seen = by_request.setdefault(span.request_id, {})
        for offset, token in enumerate(span.token_ids[: span.num_valid_rows]):
            seen[span.first_position + offset] = token
    captured = [[seen[position] for position in sorted(seen)] for seen in by_request.values()]
    assert sorted(captured) == sorted(completion.ids[:-1] for completion in (first, second))


def test_events_are_the_captured_steps_without_tensors(tiny_engine: LiveEngine) -> None:
    tiny_engine.settle()
    tiny_engine.listener.clear()
    tiny_engine.complete_all(PROMPTS[:3])
    tiny_engine.settle()
    captured = [item.message for item in tiny_engine.listener.captured if item.message.spans]
    assert [event.spans for event in tiny_engine.listener.events] == [message.spans for message in captured]
    assert not any(event.tensors for event in tiny_engine.listener.events)


def test_no_placeholder_draft_reaches_the_sampler(tiny_engine: LiveEngine) -> None:
    """The CPU random rejection sampler reads past -1 drafts; the constant schedule keeps them away, prefix hits included."""
    prompt = "placeholder " * 16
    for _ in range(3):
        tiny_engine.complete_all([prompt] * 4, temperature=1.0)
    tiny_engine.settle()
    assert all(token >= 0 for item in tiny_engine.listener.captured for span in item.message.spans for token in span.token_ids)


def test_the_rate_selects_requests_by_hash_and_is_bounded(tiny_engine: LiveEngine) -> None:
    assert tiny_engine.call("/paceline/capture", {"rate": 1.5})[0] == 400
    tiny_engine.ok("/paceline/capture", {"rate": 0.5})
    try:
        completions = [tiny_engine.complete(PROMPTS[0], max_tokens=2) for _ in range(40)]
    finally:
        tiny_engine.ok("/paceline/capture", {"rate": 1.0})
    tiny_engine.settle()
    share = sum(bool(tiny_engine.spans_of(completion)) for completion in completions) / len(completions)
    assert 0.2 < share < 0.8
