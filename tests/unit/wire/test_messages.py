from __future__ import annotations

import math

import msgspec
import pytest
from sample_messages import capture_span, capture_step, engine_stats

from wire.errors import SchemaMismatch, WireError
from wire.messages import (
    AcceptanceCount,
    CaptureSpan,
    CaptureStep,
    EngineStats,
    TensorFrame,
    decode,
    encode,
)
from wire.spec import SCHEMA_VERSION


def span() -> CaptureSpan:
    return capture_span(
        first_position=7, token_ids=[1, 2, 3, 4], num_proposed=3, num_accepted=1, emitted_ids=[2, 9], draft_version=5
    )


def step() -> CaptureStep:
    tensors = [TensorFrame(dtype="float32", shape=(4, 8), num_bytes=128)]
    return capture_step(span(), captured_at_s=2.0, finished_ids=["p"], tensors=tensors)


def stats() -> EngineStats:
    count = AcceptanceCount(
        draft_version=5,
        tenant="a",
        domain="d",
        num_verify_steps=10,
        proposed_per_position=[10, 10],
        accepted_per_position=[5, 3],
    )
    return engine_stats(count, sent_at_s=1.0, draft_version=5, num_captured_rows=3, num_dropped_rows={"queue_full": 2})


@pytest.mark.parametrize("message", [step(), stats()])
def test_a_message_comes_back_as_it_went(message: CaptureStep | EngineStats) -> None:
    assert decode(encode(message)) == message


def test_stats_bytes_do_not_change_within_a_schema_version() -> None:
    golden = (
        "8ca474797065ac656e67696e655f7374617473ae736368656d615f76657273696f6e02a9656e67696e655f6964a8656e67696e652d30"
        "ac656e67696e655f65706f6368a165a973656e745f61745f73cb3ff0000000000000ad64726166745f76657273696f6e05"
        "ae7461726765745f76657273696f6e00ac636170747572655f72617465cb3ff0000000000000aa616363657074616e63659186"
        "ad64726166745f76657273696f6e05a674656e616e74a161a6646f6d61696ea164b06e756d5f7665726966795f73746570730a"
        "b570726f706f7365645f7065725f706f736974696f6e920a0ab561636365707465645f7065725f706f736974696f6e920503"
        "b16e756d5f63617074757265645f726f777303b06e756d5f64726f707065645f726f777381aa71756575655f66756c6c02"
    )
    assert encode(stats()).hex() == golden + "aa737465705f74696d657390"


def test_stats_of_an_engine_that_times_no_steps_are_read() -> None:
    before = msgspec.msgpack.decode(encode(stats()))
    del before["step_times"]
    assert decode(msgspec.msgpack.encode(before)) == stats()


def test_a_span_counts_the_rows_on_the_emitted_text() -> None:
    assert (span().num_rows, span().num_valid_rows) == (4, 2)


def test_acceptance_length_counts_the_targets_own_token() -> None:
    assert stats().acceptance[0].acceptance_length == pytest.approx(1.8)


def test_acceptance_length_is_one_when_nothing_was_measured() -> None:
    count = AcceptanceCount(
        draft_version=0, tenant="", domain="", num_verify_steps=0, proposed_per_position=[], accepted_per_position=[]
    )
    assert count.acceptance_length == 1.0


@pytest.mark.parametrize(
    "payload", [b"", b"\x00", b"not msgpack", encode(stats())[:-3], msgspec.msgpack.encode({"type": "other"})]
)
def test_garbage_is_refused(payload: bytes) -> None:
    with pytest.raises(WireError):
        decode(payload)


def test_wrong_types_are_refused() -> None:
    content = msgspec.msgpack.decode(encode(stats())) | {"capture_rate": "much"}
    with pytest.raises(WireError, match="capture_rate"):
        decode(msgspec.msgpack.encode(content))


def test_another_schema_is_refused_by_name() -> None:
    content = msgspec.msgpack.decode(encode(stats())) | {"schema_version": SCHEMA_VERSION + 1}
    with pytest.raises(SchemaMismatch, match=f"engine-0 speaks schema {SCHEMA_VERSION + 1}, this process {SCHEMA_VERSION}"):
        decode(msgspec.msgpack.encode(content))


def test_a_new_field_of_a_newer_release_is_ignored() -> None:
    content = msgspec.msgpack.decode(encode(stats())) | {"added_later": 1}
    assert decode(msgspec.msgpack.encode(content)) == stats()


def test_endless_nesting_is_refused() -> None:
    with pytest.raises(WireError):
        decode(b"\x82\xa4type\xacengine_stats\xa1x" + b"\x91" * 100_000)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_captured_rows": -1},
        {"num_dropped_rows": {"queue_full": -1}},
        {"draft_version": -1},
        *({"step_times": [{"bucket": 1, "depth": 1, "num_steps": 1, "total_s": s}]} for s in (-1.0, math.inf, math.nan)),
        {"step_times": [{"bucket": 1, "depth": -1, "num_steps": 1, "total_s": 1.0}]},
    ],
)
def test_impossible_statistics_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(WireError):
        decode(msgspec.msgpack.encode(msgspec.msgpack.decode(encode(stats())) | changes))


@pytest.mark.parametrize(
    ("num_steps", "proposed", "accepted"),
    [(1, [2], [1]), (3, [3, 3], [1, 2]), (3, [2, 3], [1]), (3, [2], [3]), (3, [3], [1, 1])],
)
def test_counts_that_contradict_each_other_are_refused(num_steps: int, proposed: list[int], accepted: list[int]) -> None:
    with pytest.raises(ValueError, match="impossible counts"):
        AcceptanceCount(
            draft_version=0,
            tenant="",
            domain="",
            num_verify_steps=num_steps,
            proposed_per_position=proposed,
            accepted_per_position=accepted,
        )
