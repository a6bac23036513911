"""The store over DFKV: another engine loads what one has saved, and no fault of DFKV is more than a miss that is counted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dfkv_rig
import pytest
import torch
from block_files import BLOCK_TOKENS, REALM, file_bytes, header, names_of
from store_machine import LAYOUT, NAMES, Machine
from waiting import DEADLINE_S, wait_until

from server.engine import kv_store_dfkv
from server.engine.kv_store_backend import open_store
from server.engine.kv_store_counts import StoreCounts
from server.engine.kv_store_dfkv import REST_S, DfkvStore
from server.engine.kv_store_files import FileStore
from server.engine.kv_store_orders import StepOrders, UseOrder
from server.engine.kv_store_scheduler import StoreScheduler
from server.state.dfkv import DfkvState
from wire.dfkv import DfkvServers
from wire.errors import ConfigError
from wire.kv_block_format import seal
from wire.kv_dfkv import DfkvBlocks

BLOCK_KEY = f"{REALM.layout_hash}/{REALM.target_version}/{REALM.tenant}/{{name}}.0"


class Clock:
    """Stands still until a test moves it."""

    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def _answers_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine must not decide what a test sees; what the bound is for has a test that sets it."""
    monkeypatch.setattr(kv_store_dfkv, "ANSWER_S", DEADLINE_S)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The store's."""
    clock = Clock()
    monkeypatch.setattr(kv_store_dfkv, "time", clock)
    return clock


@pytest.fixture(params=dfkv_rig.KINDS)
def dfkv(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dfkv_rig.Dfkv]:
    with dfkv_rig.running(request.param, tmp_path) as dfkv:
        yield dfkv


def store_over(dfkv: dfkv_rig.Dfkv, counts: StoreCounts | None = None) -> DfkvStore:
    return DfkvStore(DfkvBlocks(dfkv.client()), counts or StoreCounts())


@pytest.fixture
def first(dfkv: dfkv_rig.Dfkv) -> Iterator[Machine]:
    machine = Machine(lambda counts: store_over(dfkv, counts), seed=1)
    yield machine
    machine.store.close()


@pytest.fixture
def second(dfkv: dfkv_rig.Dfkv) -> Iterator[Machine]:
    machine = Machine(lambda counts: store_over(dfkv, counts))
    yield machine
    machine.store.close()


def converse(machine: Machine) -> None:
    """Three blocks of a request that has ended are stored."""
    saved = machine.count("saved")
    machine.begin(2, 5, 3)
    machine.save([2, 5, 3])
    machine.store.begin_step(StepOrders(uses=[UseOrder("default", NAMES[:3], 2)]))
    wait_until(lambda: machine.count("saved") == saved + 3, "for the blocks to be saved")


def request(num_tokens: int) -> Any:
    """What the scheduler reads of vLLM's Request."""
    return SimpleNamespace(
        request_id="r", all_token_ids=list(range(num_tokens)), num_tokens=num_tokens, num_computed_tokens=0,
        num_in_flight_tokens=0, cache_salt=None, sampling_params=SimpleNamespace(extra_args=None), prompt_token_ids=[1],
        prompt_embeds=None, lora_request=None, mm_features=[], resumable=False,
    )  # fmt: skip


def num_promised_blocks(store: DfkvStore, num_blocks: int) -> int:
    """Of a prompt one token longer than that many blocks."""
    scheduler, asking = StoreScheduler(LAYOUT._replace(drops_last_block=False), store), request(num_blocks * BLOCK_TOKENS + 1)
    scheduler.begin(asking)
    return scheduler.num_promised_tokens(asking, 0) // BLOCK_TOKENS


def test_another_engine_is_promised_and_loads_what_one_has_saved(dfkv: dfkv_rig.Dfkv, first: Machine, second: Machine) -> None:
    converse(first)
    assert num_promised_blocks(store_over(dfkv), 4) == 3
    assert second.load([7, 0, 1]) == set()
    for name, cache in first.caches.items():
        assert torch.equal(second.caches[name][[7, 0, 1]], cache[[2, 5, 3]])
    assert second.count("loaded") == 3


def test_a_conversation_that_ended_can_be_located_and_removed(dfkv: dfkv_rig.Dfkv, first: Machine, second: Machine) -> None:
    converse(first)
    state = DfkvState(dfkv.client(), DfkvServers(dfkv.settings))
    wait_until(lambda: state.locate(NAMES[2]), "for the prefix to be noted")
    (located,) = state.locate(NAMES[2])
    assert located.block_hashes == tuple(NAMES[:3])
    assert (located.tenant, located.model, located.target_version) == ("default", "tiny", 0)
    (prompt,) = state.locate(NAMES[1])
    assert prompt.block_hashes == tuple(NAMES[:2])
    assert state.locate(NAMES[0]) == []
    assert located.locations[0].num_bytes == 3 * sum(cache[0].nbytes for cache in first.caches.values())
    assert state.evict(located) == located.locations[0].num_bytes
    assert num_promised_blocks(store_over(dfkv), 4) == 0
    assert second.load([7, 0, 1]) == {7, 0, 1}
    converse(first)
    assert second.load([7, 0, 1]) == set()


@pytest.mark.parametrize("fault", ["altered", "truncated", "another", "not_ours", "empty"])
def test_what_is_not_the_block_that_was_saved_is_removed_and_saved_again(
    dfkv: dfkv_rig.Dfkv, first: Machine, second: Machine, fault: str
) -> None:
    converse(first)
    client, keys = dfkv.client(), [BLOCK_KEY.format(name=name) for name in NAMES[:3]]
    whole, other = client.get(keys[1], 1 << 16), client.get(keys[0], 1 << 16)
    assert whole is not None
    assert other is not None
    middle = len(whole) // 2
    wrong = {
        "altered": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
        "truncated": whole[:middle],
        "another": other,
        "not_ours": seal(file_bytes(header(NAMES, 1))),
        "empty": b"",
    }[fault]
    client.remove([keys[1]])
    client.put(keys[1], wrong)
    assert second.load([7, 0, 1]) == {0, 1}
    assert (second.count("loaded"), second.count("corrupt")) == (1, 1)
    assert client.exist(keys) == [True, False, True]
    converse_again(first)
    assert client.get(keys[1], 1 << 16) == whole
    assert second.load([7, 0, 1]) == set()


def converse_again(machine: Machine) -> None:
    """The block that is gone is saved again, and only that."""
    saved = machine.count("saved")
    machine.save([2, 5, 3])
    wait_until(lambda: machine.count("saved") == saved + 1, "for the block to be saved")


def test_a_block_that_went_after_the_promise_is_lost(dfkv: dfkv_rig.Dfkv, first: Machine, second: Machine) -> None:
    converse(first)
    dfkv.client().remove([BLOCK_KEY.format(name=NAMES[1])])
    assert second.load([7, 0, 1]) == {0, 1}
    assert (second.count("loaded"), second.count("lost")) == (1, 1)


def test_a_server_that_is_gone_is_a_miss_and_counted(dfkv: dfkv_rig.Dfkv, first: Machine, second: Machine) -> None:
    converse(first)
    dfkv.kill()
    assert num_promised_blocks(store_over(dfkv), 4) == 0
    assert second.load([7, 0, 1]) == {7, 0, 1}
    assert second.count("lost") == 1
    second.begin(4)
    second.save([4])
    wait_until(lambda: second.count("dropped_disk_error") == 1, "for the refused block to be counted")
    second.save([4])  # saving rests, nothing is asked of the server
    assert second.count("dropped_disk_error") == 2


def test_a_server_that_hangs_holds_the_scheduler_up_once(
    dfkv: dfkv_rig.Dfkv, first: Machine, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    converse(first)
    counts = StoreCounts()
    store = store_over(dfkv, counts)
    assert num_promised_blocks(store, 3) == 3
    dfkv.hang()
    with monkeypatch.context() as patch:
        patch.setattr(kv_store_dfkv, "ANSWER_S", 0.2)
        assert num_promised_blocks(store, 3) == 0
    assert counts.take() == {"unanswered": 3}
    dfkv.wake()
    assert num_promised_blocks(store, 3) == 0  # it is not asked
    assert counts.take() == {"unanswered": 3}
    clock.now_s += REST_S
    assert num_promised_blocks(store, 3) == 3
    assert counts.take() == {}


def test_a_long_prompt_is_asked_for_until_the_first_block_that_is_missing(dfkv: dfkv_rig.Dfkv) -> None:
    names, blocks = names_of(200), DfkvBlocks(dfkv.client())
    for position in [*range(130), *range(140, 200)]:
        part = header(names, position)
        blocks.write(part, file_bytes(part))
    assert num_promised_blocks(store_over(dfkv), 200) == 130


def test_the_engines_options_choose_the_store(dfkv: dfkv_rig.Dfkv, tmp_path: Path) -> None:
    def opened(**options: Any) -> object:
        return open_store(SimpleNamespace(get_from_extra_config=options.get), StoreCounts())  # type: ignore[arg-type]

    assert isinstance(opened(dfkv=dfkv.settings.model_dump()), DfkvStore)
    assert isinstance(opened(directory=str(tmp_path / "kv"), max_bytes=1), FileStore)
    for wrong in ({}, {"directory": "kv"}, {"directory": "kv", "max_bytes": 0}, {"dfkv": {"members": "n1"}}):
        with pytest.raises(ConfigError):
            opened(**wrong)
