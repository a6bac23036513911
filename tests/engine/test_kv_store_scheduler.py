"""The scheduler's side of the store: what it may keep of a request."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from block_files import BLOCK_TOKENS, REALM

from server.engine.kv_store_counts import StoreCounts
from server.engine.kv_store_files import FileStore
from server.engine.kv_store_layout import KvStoreLayout
from server.engine.kv_store_scheduler import StoreScheduler
from wire.kv_files import KvDirectory

NUM_TOKENS = 3 * BLOCK_TOKENS


def request(num_computed_tokens: int) -> Any:
    """What the scheduler reads of vLLM's Request."""
    return SimpleNamespace(
        request_id="r", all_token_ids=list(range(NUM_TOKENS)), num_tokens=NUM_TOKENS, num_computed_tokens=num_computed_tokens,
        num_in_flight_tokens=0, cache_salt=None, sampling_params=SimpleNamespace(extra_args=None), prompt_token_ids=list(range(BLOCK_TOKENS + 1)),
        prompt_embeds=None, lora_request=None, mm_features=[], resumable=False,
    )  # fmt: skip


def step(block_ids: list[int]) -> Any:
    """What it reads of vLLM's SchedulerOutput."""
    state = SimpleNamespace(get_block_ids=lambda _request_id: [block_ids])
    return SimpleNamespace(num_scheduled_tokens={"r": 1}, kv_connector_block_state=state)


def scheduler(tmp_path: Path) -> StoreScheduler:
    store = FileStore(KvDirectory(tmp_path), 1 << 20, StoreCounts())
    return StoreScheduler(KvStoreLayout("tiny", REALM.layout_hash, BLOCK_TOKENS, 1, True), store)


def test_nothing_is_kept_of_a_request_that_ends_while_another_connector_still_fills_its_blocks(tmp_path: Path) -> None:
    store, waiting = scheduler(tmp_path), request(NUM_TOKENS - 1)  # vLLM counts what is being pulled as computed
    store.begin(waiting)
    store.accept(waiting, [0, 1, 2], 0)
    assert store.finish(waiting, [0, 1, 2]) is False
    empty = SimpleNamespace(num_scheduled_tokens={}, kv_connector_block_state=None)
    orders = store.orders(empty)  # type: ignore[arg-type]
    assert (orders.saves, orders.uses, orders.finished_ids) == ([], [], [])


def test_a_request_that_ran_is_kept_a_step_longer_to_be_saved(tmp_path: Path) -> None:
    store, running = scheduler(tmp_path), request(BLOCK_TOKENS)
    store.begin(running)
    store.orders(step([4, 5, 6]))
    running.num_computed_tokens = NUM_TOKENS
    assert store.finish(running, [4, 5, 6]) is True
    orders = store.orders(SimpleNamespace(num_scheduled_tokens={}, kv_connector_block_state=None))  # type: ignore[arg-type]
    assert [block.block_id for save in orders.saves for block in save.blocks] == [5, 6]
    assert orders.finished_ids == ["r"]
    assert [(len(use.names), use.num_prompt_blocks) for use in orders.uses] == [(3, 1)]
