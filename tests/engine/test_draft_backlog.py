"""What is put off at K = 0 is made up for before anything can miss it, and no draft forward runs in between."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from live_engine import Completion, LiveEngine
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from server.engine.draft_backlog import MAX_STEPS, DraftBacklog

PROMPTS = [f"backlog prompt {i}: " for i in range(8)]
BLOCK_TOKENS = 32
AUX_WIDTH = 6

Proposals = dict[int, list[int]]
"""By position of the last verified token."""


def proposals_of(engine: LiveEngine, completion: Completion) -> Proposals:
    return {span.first_position: span.token_ids[1:] for _, span in engine.spans_of(completion) if span.num_proposed == 3}


def agreement(engine: LiveEngine, completions: list[Completion], reference: list[Completion]) -> tuple[int, int]:
    """(equal, compared) proposals at the positions both verified at."""
    equal = compared = 0
    for completion, expected in zip(completions, reference, strict=True):
        ours, theirs = proposals_of(engine, completion), proposals_of(engine, expected)
        compared += len(ours.keys() & theirs.keys())
        equal += sum(ours[position] == theirs[position] for position in ours.keys() & theirs.keys())
    return equal, compared


def after_a_pause(
    engine: LiveEngine, prompts: list[str], salt: str, num_rows: int, *, max_tokens: int = 150
) -> list[Completion]:
    """Completions begun at K = 0, which becomes 3 once so many of their rows are computed."""
    engine.settle()
    try:
        engine.set_depth(0)
        engine.core("probe_set_depth_after", 3, num_rows)
        return engine.complete_all(prompts, max_tokens=max_tokens, cache_salt=salt)
    finally:
        engine.set_depth(3)


def test_proposals_after_a_time_at_depth_zero_are_those_of_an_engine_that_always_speculated(tiny_engine: LiveEngine) -> None:
    prompts = PROMPTS[:4]
    tiny_engine.settle()
    tiny_engine.listener.clear()
    reference = tiny_engine.complete_all(prompts, max_tokens=150, cache_salt="always")
    for num_rows in (150, 250, 350, 450):
        paused = after_a_pause(tiny_engine, prompts, f"paused for {num_rows}", num_rows)
        tiny_engine.settle()
        assert [each.token_ids for each in paused] == [each.token_ids for each in reference]
        equal, compared = agreement(tiny_engine, paused, reference)
        assert compared >= 30
        assert equal == compared


def test_blocks_that_change_hands_at_depth_zero_change_no_token_and_hardly_a_proposal(tiny_engine: LiveEngine) -> None:
    """Few blocks: four requests at a time preempt one another. A prompt in chunks, as of one that was preempted, costs stock vLLM a
    few rows: at a chunk's end it takes the prompt's last token for the next one.
    """
    tiny_engine.settle()
    tiny_engine.listener.clear()
    num_preempted = tiny_engine.metric("vllm:num_preemptions_total")
    reference = tiny_engine.complete_all(PROMPTS, max_tokens=300, cache_salt="always many")
    for num_rows in (500, 1000, 1500):
        paused = after_a_pause(tiny_engine, PROMPTS, f"many paused for {num_rows}", num_rows, max_tokens=300)
        tiny_engine.settle()
        assert [each.token_ids for each in paused] == [each.token_ids for each in reference]
        equal, compared = agreement(tiny_engine, paused, reference)
        assert compared >= 100
        assert equal >= 0.97 * compared
    assert tiny_engine.metric("vllm:num_preemptions_total") > num_preempted


def test_a_prefix_cached_at_depth_zero_is_as_good_as_any(tiny_engine: LiveEngine) -> None:
    """The follow-up turn reads the draft's KV of an answer that has ended."""

    def two_turns(salt: str, first_depth: int) -> Completion:
        tiny_engine.set_depth(first_depth)
        first = tiny_engine.complete("turn one: ", max_tokens=200, cache_salt=salt)
        tiny_engine.set_depth(3)
        num_hits = tiny_engine.metric("vllm:prefix_cache_hits_total")
        second = tiny_engine.complete([*first.ids, 40, 41, 42], max_tokens=64, cache_salt=salt)
        assert tiny_engine.metric("vllm:prefix_cache_hits_total") - num_hits >= 4 * BLOCK_TOKENS
        return second

    tiny_engine.settle()
    tiny_engine.listener.clear()
    expected, second = two_turns("turns at 3", 3), two_turns("turns at 0", 0)
    tiny_engine.settle()
    assert second.ids == expected.ids
    equal, compared = agreement(tiny_engine, [second], [expected])
    assert compared >= 20
    assert equal == compared


def test_at_depth_zero_the_draft_runs_seldom_and_leaves_no_row_out(tiny_engine: LiveEngine) -> None:
    tiny_engine.settle()
    try:
        tiny_engine.set_depth(0)
        tiny_engine.settle()
        tiny_engine.rpc("probe_take_draft_work")
        completion = tiny_engine.complete("seldom: ", max_tokens=100, cache_salt="seldom")
        tiny_engine.settle()
        work = tiny_engine.rpc("probe_take_draft_work")
    finally:
        tiny_engine.set_depth(3)
    num_mark_rows = 3
    assert work["rows"] == len(completion.ids) - 1 + num_mark_rows  # the last token is never computed with
    assert 2 <= work["forwards"] <= 2 + 100 // MAX_STEPS + 1  # a prompt each, every so many steps, and at the end
    assert work["questions"] == 0


def test_what_the_engine_says_of_itself_names_the_backlog(tiny_engine: LiveEngine) -> None:
    assert "draft_backlog" in tiny_engine.ok("/paceline/status")["workers"][0]["parts"]


class CacheWritingDrafter:
    """Takes its inputs as vLLM's drafter does, and writes them where it would write the KV made of them."""

    needs_extra_input_slots = False
    uses_mrope = False
    max_num_tokens = 128

    def __init__(self, num_slots: int) -> None:
        self.cache = torch.zeros(num_slots, 2 + AUX_WIDTH)
        self.forwards: list[int] = []

    def propose(
        self,
        num_speculative_tokens: int,
        target_token_ids: torch.Tensor,
        target_positions: torch.Tensor,
        target_hidden_states: torch.Tensor,
        next_token_ids: torch.Tensor,
        token_indices_to_sample: None,
        common_attn_metadata: CommonAttentionMetadata,
        sampling_metadata: Any,
    ) -> torch.Tensor:
        assert token_indices_to_sample is None
        metadata = common_attn_metadata
        counts = metadata.query_start_loc.diff()
        assert counts.max() == metadata.max_query_len
        assert torch.equal(metadata.query_start_loc, metadata.query_start_loc_cpu)
        last = metadata.query_start_loc[1:] - 1
        assert torch.equal(target_positions[last] + 1, metadata.seq_lens)
        token_ids = target_token_ids.roll(-1)
        token_ids[last] = next_token_ids
        rows = torch.cat([token_ids[:, None], target_positions[:, None], target_hidden_states], dim=1)
        assert len(rows) == metadata.num_actual_tokens == metadata.slot_mapping.numel()
        self.cache[metadata.slot_mapping] = rows.float()
        self.forwards.append(len(rows))
        return torch.empty(metadata.num_reqs, num_speculative_tokens)


class TwoRequests(GPUModelRunner):
    """A runner that was never loaded, of two requests that decode one token a step."""

    def __init__(self, *, has_connector: bool = False) -> None:
        self.request_ids = ["a", "b"]
        self.first_positions = [30, 40]
        self.slot_of = torch.arange(2 * 200).view(2, 200).flip(1)
        self.drafter = CacheWritingDrafter(self.slot_of.numel())
        self.positions = torch.zeros(8, dtype=torch.int64)
        self.input_batch = SimpleNamespace(req_ids=self.request_ids, num_reqs=2, sampling_metadata=None)
        self.discard_request_mask = SimpleNamespace(np=torch.zeros(8, dtype=torch.bool).numpy())
        self.cache_config = SimpleNamespace(block_size=BLOCK_TOKENS)
        self.vllm_config = SimpleNamespace(kv_transfer_config=object() if has_connector else None)
        self.expected = torch.zeros_like(self.drafter.cache)
        self.num_stock = 0
        self.num_steps = 0
        self.generator = torch.Generator().manual_seed(0)

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> None:
        """The step's forward has no part in this."""

    def propose_draft_token_ids(self, *_: Any) -> torch.Tensor:
        self.num_stock += 1
        return torch.empty(2, 3)

    def step(self, *, depth: int = 0, **changes: Any) -> torch.Tensor:
        """One step of both; what stock would write to the draft's cache is in `expected`."""
        output = SimpleNamespace(
            num_scheduled_tokens=dict.fromkeys(self.request_ids, 1),
            total_num_scheduled_tokens=2,
            scheduled_spec_decode_tokens={},
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
            num_spec_tokens_to_schedule=depth,
        )
        vars(output).update(changes)
        self.execute_model(output)
        self.positions[:2] = torch.tensor(self.first_positions) + self.num_steps
        self.num_steps += 1
        slots = self.slot_of.gather(1, self.positions[:2, None])[:, 0]
        aux = [torch.randn(4, AUX_WIDTH // 3, generator=self.generator) for _ in range(3)]
        sampled = torch.randint(100, (2, 1), generator=self.generator, dtype=torch.int32)
        metadata = CommonAttentionMetadata(
            query_start_loc=torch.tensor([0, 1, 2], dtype=torch.int32),
            query_start_loc_cpu=torch.tensor([0, 1, 2], dtype=torch.int32),
            seq_lens=(self.positions[:2] + 1).int(),
            num_reqs=2,
            num_actual_tokens=2,
            max_query_len=1,
            max_seq_len=200,
            block_table_tensor=torch.zeros(2, 4),
            slot_mapping=slots,
        )
        row = torch.cat([sampled, self.positions[:2, None], torch.cat(aux, dim=1)[:2]], dim=1)
        self.expected[slots] = row
        return self.propose_draft_token_ids(output, sampled, None, None, None, aux, None, metadata, None)

    @property
    def missing(self) -> int:
        """Rows that are not in the draft's cache yet."""
        return int((self.drafter.cache != self.expected).any(dim=1).sum())


def test_held_steps_are_written_in_one_forward_as_they_would_have_been_one_by_one() -> None:
    runner = TwoRequests()
    backlog = DraftBacklog(runner)
    for _ in range(5):
        assert runner.step().shape == (2, 0)
    assert (runner.missing, runner.drafter.forwards, runner.num_stock) == (10, [], 0)
    backlog.write()
    assert (runner.missing, runner.drafter.forwards) == (0, [10])
    backlog.write()
    assert runner.drafter.forwards == [10]


def test_no_more_than_so_many_steps_are_held() -> None:
    runner = TwoRequests()
    DraftBacklog(runner)
    for _ in range(2 * MAX_STEPS):
        runner.step()
    assert runner.drafter.forwards == [2 * MAX_STEPS] * 2
    assert runner.missing == 0


def test_no_more_rows_are_held_than_the_drafter_takes_at_once() -> None:
    runner = TwoRequests()
    runner.drafter.max_num_tokens = 7
    DraftBacklog(runner)
    for _ in range(6):
        runner.step()
    assert runner.drafter.forwards == [6, 6]


@pytest.mark.parametrize(
    "changes",
    [
        {"depth": 3},
        {"scheduled_new_reqs": ["c"]},
        {"num_scheduled_tokens": {"a": 1}, "total_num_scheduled_tokens": 1},
        {"num_scheduled_tokens": {"a": 1, "c": 1}},
        {"num_scheduled_tokens": {"a": 1, "b": 7}, "total_num_scheduled_tokens": 8},
        {"scheduled_spec_decode_tokens": {"a": [5]}},
        {"scheduled_cached_reqs": SimpleNamespace(resumed_req_ids={"a"})},
        {"num_scheduled_tokens": {}, "total_num_scheduled_tokens": 0},
    ],
    ids=["proposes", "new", "ended", "replaced", "prefills", "verifies", "resumed", "idle"],
)
def test_before_a_step_of_any_other_kind_nothing_is_held(changes: dict[str, Any]) -> None:
    runner = TwoRequests()
    found: list[int] = []
    runner.execute_model = lambda *_: found.append(runner.missing)  # type: ignore[method-assign]
    DraftBacklog(runner)
    runner.step()
    runner.step()
    runner.step(**changes)
    assert found == [0, 2, 0]


def test_a_step_of_another_kind_is_left_to_vllm() -> None:
    runner = TwoRequests()
    DraftBacklog(runner)
    runner.step(depth=3)
    runner.discard_request_mask.np[1] = True  # a prompt that goes on
    runner.step()
    assert runner.num_stock == 2


def test_where_a_connector_may_take_a_block_a_full_one_lacks_nothing() -> None:
    runner = TwoRequests(has_connector=True)
    DraftBacklog(runner)
    missing = []
    for _ in range(4):
        runner.step()
        missing.append(runner.missing)
    assert missing == [2, 0, 2, 4]  # request a begins at position 30


def test_rows_after_a_gap_are_not_taken_for_consecutive_ones() -> None:
    runner = TwoRequests()
    backlog = DraftBacklog(runner)
    runner.step()
    runner.step()
    runner.num_steps += 1  # vLLM left the draft out
    runner.step()
    backlog.write()
    assert runner.drafter.forwards == [4, 2]
    assert runner.missing == 0
