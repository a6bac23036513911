"""The bars about failures, each run whole against a tiny system: met where it does well, missed where it does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny_system
from tiny_system import ERROR, TinySystem

from loadtest import system as system_module
from loadtest.bars import disconnects, drill, restarts
from loadtest.bars.load import Load
from loadtest.bars.registry import Bench, Measured
from loadtest.client import StreamResult
from loadtest.processes import SystemUnderTestError
from loadtest.run.conduct import Provenance
from loadtest.sources import human_eval
from loadtest.statistics import Interval
from loadtest.system import ONE_ENGINE, Pool, System
from loadtest.traffic import Prompt, Source

PROMPTS = tuple(Prompt(str(index), ({"role": "user", "content": str(index)},)) for index in range(16))
Measure = Callable[[Bench], Awaitable[dict[str, Measured]]]
Spoil = Callable[[TinySystem], None]


def well(_tiny: TinySystem) -> None:
    """Nothing is wrong with it."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(human_eval, "load", lambda: Source(PROMPTS, PROMPTS))
    monkeypatch.setattr(drill, "CALM_S", 0.2)
    monkeypatch.setattr(system_module, "POLL_S", 0.05)
    monkeypatch.setattr(disconnects, "POLL_S", 0.05)
    monkeypatch.setattr(disconnects, "LEASE_S", 0.3)
    monkeypatch.setattr(disconnects, "SLACK_S", 0.0)


def measure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, function: Measure, spoil: Spoil = well) -> Measured:
    """The bar's one value over a tiny system."""

    @asynccontextmanager
    async def tiny_running(
        _arguments: Sequence[str], _settings: Sequence[str] = (), *, pools: Sequence[Pool] = ONE_ENGINE
    ) -> AsyncIterator[System]:
        async with tiny_system.running(tmp_path, pools) as (tiny, system):
            spoil(tiny)
            yield system

    for module in (drill, restarts, disconnects):
        monkeypatch.setattr(module, "running_system", tiny_running)

    async def run() -> dict[str, Measured]:
        return dict(await function(Bench((), Provenance(None, {}, {}))))

    (value,) = asyncio.run(run()).values()
    return value


def test_the_drill_is_met_where_only_the_gateways_own_death_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    value = measure(monkeypatch, tmp_path, drill.two_decode)
    assert value.value == 0
    assert len(value.detail["kills"]) == 2 * 5
    assert value.detail["cut_by_the_gateways_own_death"] > 0
    assert value.detail["requests"] > 50


@pytest.mark.parametrize(
    ("sent_at_s", "ended_at_s", "status", "is_cut"),
    [
        (9.0, 10.0, 200, True),
        (9.0, 10.1, None, True),
        (10.4, 10.6, 200, True),
        (11.0, 11.0, None, True),
        (9.0, 9.9, 503, False),
        (11.0, 11.1, 503, False),
        (11.0, 14.0, 200, False),
        (19.0, 21.0, None, False),
        (21.0, 21.0, None, False),
    ],
    ids=[
        "broken",
        "unanswered",
        "broken by the dying",
        "refused",
        "before",
        "answered 503",
        "broken later",
        "left hanging",
        "after",
    ],
)
def test_only_what_a_killed_gateway_itself_breaks_is_set_apart(
    sent_at_s: float, ended_at_s: float, status: int | None, is_cut: bool
) -> None:
    kill = drill.Kill("gateway", "process", Interval(10.0, 20.0), dead_at_s=10.5)
    result = StreamResult("p", sent_at_s, status=status, error="broken", ended_at_s=ended_at_s)
    value = drill.unnoticed(Load([result]), [kill], {"p": ""})
    assert (value.value, value.detail["cut_by_the_gateways_own_death"]) == (int(not is_cut), int(is_cut))
    other = drill.Kill("decode-0", "process", Interval(10.0, 20.0), dead_at_s=10.5)
    assert drill.unnoticed(Load([result]), [other], {"p": ""}).value == 1


def test_the_drill_counts_a_stream_that_an_engines_death_breaks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def spoil(tiny: TinySystem) -> None:
        tiny.breaks_when_restarted = True

    value = measure(monkeypatch, tmp_path, drill.two_decode, spoil)
    assert value.value is not None
    assert value.value >= 8
    assert value.detail["reasons"] == ["the engine failed"]


def test_the_drill_counts_answers_that_differ_from_the_undisturbed_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def spoil(tiny: TinySystem) -> None:
        tiny.wrong_after_starts = 9

    value = measure(monkeypatch, tmp_path, drill.two_decode, spoil)
    assert value.value
    assert value.detail["answered_otherwise"]
    assert value.detail["failed"] == 0


def not_resuming(tiny: TinySystem) -> None:
    tiny.is_resuming = False


def test_one_error_for_each_stream_on_the_only_decode_engine_is_as_promised(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    value = measure(monkeypatch, tmp_path, drill.one_decode, not_resuming)
    assert value.value == 0
    assert value.detail["streams_on_the_killed_engine_that_failed"] > 0
    assert value.detail["cut_by_the_gateways_own_death"] > 0
    assert len(value.detail["kills"]) == 2 * 4


@pytest.mark.parametrize("function", [drill.two_decode, drill.one_decode, restarts.rolling])
def test_a_prefill_pool_that_nobody_uses_is_not_killed_for_show(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, function: Measure
) -> None:
    monkeypatch.setattr(drill, "BACK_WITHIN_S", 2.0)

    def spoil(tiny: TinySystem) -> None:
        tiny.uses_prefill_pool = False

    with pytest.raises(SystemUnderTestError, match="0 over the prefill pool"):
        measure(monkeypatch, tmp_path, function, spoil)


def test_the_death_of_a_prefill_engine_is_nobodys_excuse() -> None:
    kills = [
        drill.Kill(name, "process", Interval(at_s, at_s + 5), at_s + 1)
        for name, at_s in (("prefill-0", 10.0), ("decode-0", 50.0))
    ]
    error = {"status": 200, "error": "died", "error_bodies": [ERROR]}
    excused = StreamResult("p", 49.0, ended_at_s=51.0, **error)
    broken = StreamResult("p", 9.0, ended_at_s=11.0, **error)
    assert drill.well_failed(Load([excused]), kills, {"p": ""}).value == 0
    assert drill.well_failed(Load([excused, broken]), kills, {"p": ""}).value == 1


@pytest.mark.parametrize(
    "stream_end",
    [
        [],
        [{"error": ERROR}, "[DONE]"],
        [{"error": ERROR}, {"error": ERROR}],
        [{"error": "died"}],
        [{"error": {"message": "died"}}],
    ],
    ids=["none", "then an end mark", "two", "not OpenAI's shape", "fields missing"],
)
def test_any_other_end_of_those_streams_is_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stream_end: list[Any]
) -> None:
    def spoil(tiny: TinySystem) -> None:
        not_resuming(tiny)
        tiny.stream_end = stream_end

    value = measure(monkeypatch, tmp_path, drill.one_decode, spoil)
    assert value.value


def test_a_malformed_refusal_while_the_engine_is_away_is_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def spoil(tiny: TinySystem) -> None:
        not_resuming(tiny)
        tiny.refusal = {"detail": "no"}
        tiny.awaits_refusal = True

    value = measure(monkeypatch, tmp_path, drill.one_decode, spoil)
    assert value.value
    assert value.detail["refused_until_it_was_back"]


def test_a_process_that_never_comes_back_ends_the_drill(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(drill, "BACK_WITHIN_S", 5.0)  # for the calm before the kill too

    async def no_supervision(_self: TinySystem) -> None:
        await asyncio.sleep(600)

    monkeypatch.setattr(TinySystem, "supervise", no_supervision)
    with pytest.raises(SystemUnderTestError, match=r"prefill-0 was not started again"):
        measure(monkeypatch, tmp_path, drill.two_decode)


def test_a_rolling_restart_that_nobody_notices_meets_its_bar(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    value = measure(monkeypatch, tmp_path, restarts.rolling)
    assert value.value == 0
    assert set(value.detail["restarts"]) == {"prefill-0", "decode-0", "decode-1"}
    assert value.detail["requests"] >= restarts.CONCURRENCY, "each client was answered"


def test_a_rolling_restart_that_breaks_streams_misses_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def spoil(tiny: TinySystem) -> None:
        tiny.breaks_when_restarted = True

    value = measure(monkeypatch, tmp_path, restarts.rolling, spoil)
    assert value.value


def test_an_engine_that_is_never_drained_ends_the_measurement(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(restarts, "DRAINED_WITHIN_S", 0.2)
    monkeypatch.setattr(TinySystem, "_drain", TinySystem._undrain)
    with pytest.raises(SystemUnderTestError, match="prefill-0 is not drained"):
        measure(monkeypatch, tmp_path, restarts.rolling)


def test_clients_that_leave_and_nothing_held_meet_the_bar(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(disconnects, "NUM_DISCONNECTS", 40)
    seen: list[TinySystem] = []
    value = measure(monkeypatch, tmp_path, disconnects.leaks, seen.append)
    assert value.value == 0
    assert value.detail["disconnects"] >= 40
    assert value.detail["leases"]["released"] > 0
    # Some leave before their request has arrived, on a slow machine most of them.
    assert 0 < seen[0].num_disconnects <= value.detail["disconnects"]


def test_clients_that_never_left_between_the_legs_prove_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(disconnects, "NUM_DISCONNECTS", 10)

    def spoil(tiny: TinySystem) -> None:
        tiny.uses_prefill_pool = False

    assert measure(monkeypatch, tmp_path, disconnects.leaks, spoil).value is None


def test_a_counter_that_leaks_with_each_disconnect_misses_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(disconnects, "NUM_DISCONNECTS", 20)

    def spoil(tiny: TinySystem) -> None:
        tiny.leaks_on_disconnect = True

    value = measure(monkeypatch, tmp_path, disconnects.leaks, spoil)
    assert value.value == 1
    assert "requests in the gateway" in value.detail["still_held"]


def test_blocks_in_use_beyond_the_base_are_a_leak() -> None:
    base = disconnects.Held({"running": 0.0}, {"engine-0": 0.01})
    assert disconnects.Held({"running": 0.0}, {"engine-0": 0.01}).leaks(base) == {}
    assert list(disconnects.Held({"running": 0.0}, {"engine-0": 0.02}).leaks(base)) == [
        "share of KV blocks above the base in engine-0"
    ]


def test_a_metrics_page_that_lacks_a_counter_is_not_clean() -> None:
    with pytest.raises(SystemUnderTestError, match="vllm:kv_cache_usage_perc"):
        disconnects.read_held("paceline_requests_in_flight 0")


def test_pools_become_one_word_of_the_command_line() -> None:
    words = system_module.pool_setting([Pool("prefill-0", "prefill"), Pool("decode-0", "decode")])
    assert words == "pool=[{id='prefill-0', kind='prefill', port=0}, {id='decode-0', kind='decode', port=0}]"
