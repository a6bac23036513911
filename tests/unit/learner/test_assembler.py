from __future__ import annotations

import time

import pytest
import torch

from drafter.batch import UNKNOWN_TOKEN
from learner.assemble import Assembler
from learner.receiver import Received


@pytest.fixture
def clock():
    class Clock:
        now = 0.0

        def __call__(self) -> float:
            return self.now

    return Clock()


def assembler_of(clock, **bounds: int) -> Assembler:
    defaults = {"max_open_rows": 1000, "max_completion_rows": 100, "max_context_rows": 100}
    return Assembler(**(defaults | bounds), idle_timeout_s=10.0, clock=clock)


@pytest.fixture
def assembler(clock):
    return assembler_of(clock)


@pytest.fixture
def feed(make_step):
    """Sends spans whose rows are numbered by position, so that every row can be recognised."""

    def send(assembler, spans, *, finished=(), offset=0.0, **values):
        positions = [span.first_position + row for span in spans for row in range(span.num_rows)]
        aux = torch.tensor(positions, dtype=torch.float32)[:, None].expand(-1, 48) + offset
        hidden = torch.tensor(positions, dtype=torch.float32)[:, None].expand(-1, 16) + offset
        return assembler.add(Received(make_step(spans, finished=finished, **values), aux, hidden, time.time()))

    return send


def test_verify_steps_become_one_request(assembler, feed, make_span):
    feed(assembler, [make_span("r", 0, [10, 11, 12], emitted_ids=[13])])
    feed(
        assembler, [make_span("r", 3, [13, 14, 99, 98], num_proposed=3, num_accepted=1, emitted_ids=[14, 15], draft_version=2)]
    )
    (request,) = feed(assembler, [make_span("r", 5, [15], emitted_ids=[16])], finished=("r",))
    rows = request.rows
    assert rows.positions_T.tolist() == [0, 1, 2, 3, 4, 5]
    assert rows.next_tokens_T.tolist() == [11, 12, 13, 14, 15, 16]
    assert rows.hidden_TD[:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert rows.num_prompt_tokens == 3
    assert request.num_tokens == 4
    outcome = request.outcomes[2]
    assert (outcome.proposed_ids, outcome.num_accepted, outcome.draft_version) == ((14, 99, 98), 1, 2)
    assert assembler.num_open_rows == 0


def test_chunked_prompt_with_cached_prefix_is_a_gap(assembler, feed, make_span):
    feed(assembler, [make_span("r", 4, [14, 15])])
    feed(assembler, [make_span("r", 6, [16], emitted_ids=[17])])
    (request,) = feed(assembler, [make_span("r", 7, [17], emitted_ids=[18])], finished=("r",))
    assert request.rows.positions_T.tolist() == [4, 5, 6, 7]
    assert request.rows.num_prompt_tokens == 7


def test_preempted_rows_are_taken_once_and_the_first_copy_counts(assembler, feed, make_span):
    feed(assembler, [make_span("r", 0, [10, 11], emitted_ids=[12])])
    feed(assembler, [make_span("r", 2, [12], emitted_ids=[13])])
    feed(assembler, [make_span("r", 0, [10, 11, 12, 13], emitted_ids=[14])], offset=0.5)
    (request,) = feed(assembler, [make_span("r", 4, [14], emitted_ids=[15])], finished=("r",))
    assert request.rows.positions_T.tolist() == [0, 1, 2, 3, 4]
    assert request.rows.hidden_TD[:, 0].tolist() == [0, 1, 2, 3.5, 4]
    assert request.rows.num_prompt_tokens == 2


def test_a_dropped_message_leaves_a_gap_with_unknown_next_token(assembler, feed, make_span):
    feed(assembler, [make_span("r", 0, [10, 11], emitted_ids=[12])])
    (request,) = feed(assembler, [make_span("r", 5, [15], emitted_ids=[16])], finished=("r",))
    assert request.rows.positions_T.tolist() == [0, 1, 5]
    assert request.rows.next_tokens_T.tolist() == [11, 12, 16]
    feed(assembler, [make_span("s", 0, [10, 11])])
    (request,) = feed(
        assembler, [make_span("s", 4, [14], emitted_ids=[15]), make_span("s", 5, [15], emitted_ids=[16])], finished=("s",)
    )
    assert request.rows.next_tokens_T.tolist() == [11, UNKNOWN_TOKEN, 15, 16]


def test_spans_of_several_requests_in_one_step_do_not_mix(assembler, feed, make_span):
    feed(assembler, [make_span("a", 0, [1, 2], emitted_ids=[3]), make_span("b", 0, [5], emitted_ids=[6])])
    done = feed(
        assembler,
        [make_span("b", 1, [6, 9], num_proposed=1, num_accepted=0, emitted_ids=[7]), make_span("a", 2, [3], emitted_ids=[4])],
        finished=("a", "b"),
    )
    assert {request.key: request.rows.positions_T.tolist() for request in done} == {"e.a": [0, 1, 2], "e.b": [0, 1]}


def test_silent_requests_are_closed_by_time(assembler, feed, make_span, clock):
    feed(assembler, [make_span("r", 0, [10, 11], emitted_ids=[12])])
    feed(assembler, [make_span("r", 2, [12], emitted_ids=[13])])
    assert assembler.expire() == []
    clock.now = 11.0
    assert [request.key for request in assembler.expire()] == ["e.r"]
    assert assembler.num_timed_out == 1


def test_late_rows_of_a_closed_request_are_ignored(assembler, feed, make_span):
    feed(assembler, [make_span("r", 0, [10, 11], emitted_ids=[12])], finished=("r",))
    feed(assembler, [make_span("r", 2, [12], emitted_ids=[13])])
    assert assembler.num_open_rows == 0
    assert assembler.num_late_spans == 1


def test_an_engine_restart_closes_what_the_old_process_left(assembler, feed, make_span):
    feed(assembler, [make_span("r", 0, [10, 11], emitted_ids=[12]), make_span("q", 0, [1])])
    feed(assembler, [make_span("r", 2, [12], emitted_ids=[13])])
    done = feed(assembler, [make_span("r", 0, [20], emitted_ids=[21])], engine_epoch="f")
    assert [request.key for request in done] == ["e.r"]
    assert assembler.num_open_rows == 1


def test_open_rows_are_bounded(feed, make_span, clock):
    assembler = assembler_of(clock, max_open_rows=5)
    feed(assembler, [make_span("a", 0, [1, 2, 3], emitted_ids=[4])])
    feed(assembler, [make_span("b", 0, [1, 2, 3], emitted_ids=[4])])
    assert assembler.num_open_rows == 3
    assert assembler.num_evicted == 1


def test_a_long_request_is_cut_to_the_rows_next_to_where_its_completion_starts(feed, make_span, clock):
    assembler = assembler_of(clock, max_completion_rows=3, max_context_rows=2)
    feed(assembler, [make_span("r", 0, [10, 11, 12, 13, 14], emitted_ids=[15])])
    (request,) = feed(assembler, [make_span("r", 5, [15, 16, 17, 18], emitted_ids=[19])], finished=("r",))
    rows = request.rows
    assert rows.positions_T.tolist() == [2, 3, 4, 5, 6]
    assert rows.next_tokens_T.tolist() == [13, 14, 15, 16, 17]
    assert rows.aux_TX[:, 0].tolist() == rows.hidden_TD[:, 0].tolist() == [2, 3, 4, 5, 6]
    assert (request.num_tokens, rows.num_prompt_tokens) == (3, 5)
    assert assembler.num_cut_rows == 4
    assert assembler.num_open_rows == 0


def test_prompt_key_is_the_same_with_and_without_cached_prefix(assembler, feed, make_span):
    feed(assembler, [make_span("a", 0, [1, 2, 3], emitted_ids=[4])])
    feed(assembler, [make_span("b", 2, [3], emitted_ids=[4])])
    spans = [make_span("a", 3, [4], emitted_ids=[5]), make_span("b", 3, [4], emitted_ids=[5])]
    first, second = feed(assembler, spans, finished=("a", "b"))
    assert first.prompt_key == second.prompt_key


def test_the_engines_prompt_key_wins(assembler, feed, make_span):
    feed(assembler, [make_span("a", 0, [1, 2], emitted_ids=[3], prompt_key="k")])
    (request,) = feed(assembler, [make_span("a", 2, [3], emitted_ids=[4])], finished=("a",))
    assert request.prompt_key == "k"
