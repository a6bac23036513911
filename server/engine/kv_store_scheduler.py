"""The scheduler's side of the KV store: which stored prefix a request can have, and which of its blocks to keep.

It promises by the names of what is stored only. Whether a block is whole is for the workers to find out: what they cannot
load is computed anew, and a request is promised something only once.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from server.engine.kv_store_backend import BlockStore
from server.engine.kv_store_layout import KvStoreLayout
from server.engine.kv_store_orders import BlockOrder, LoadOrder, SaveOrder, StepOrders, StepReport, UseOrder
from server.engine.requests import DEFAULT_LABEL
from wire.kv_block_format import KvRealm, tenant_label
from wire.kv_blocks import extend_chain, root_name

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class TrackedRequest:
    """One request and the names of its blocks so far."""

    def __init__(self, request: Request, block_size_tokens: int) -> None:
        self.request = request
        self.tenant = _tenant(request)
        self.is_storable = _is_plain_text(request)
        self.num_saved_blocks = 0
        self.promised = range(0)
        """Blocks that would be loaded, by position."""
        self.had_load = False
        self.is_loading = False
        self.was_scheduled = False
        """Until then its blocks may be in the making by somebody else: a pull, whose tokens vLLM counts as computed at once."""
        self._block_size = block_size_tokens
        self._names = [root_name(block_size_tokens)]

    def block(self, position: int, block_id: int) -> BlockOrder:
        return BlockOrder(self._names[position + 1].hex(), self._names[position].hex(), position, block_id)

    def name(self, position: int) -> str:
        return self._names[position + 1].hex()

    def extend(self, num_tokens: int) -> int:
        """Name the whole blocks of the first `num_tokens` tokens; returns how many there are."""
        num_blocks = num_tokens // self._block_size
        num_named = len(self._names) - 1
        if num_named < num_blocks:
            token_ids = self.request.all_token_ids[num_named * self._block_size : num_blocks * self._block_size]
            salt = self.request.cache_salt if num_named == 0 else None
            self._names += extend_chain(self._names[-1], token_ids, self._block_size, [[salt]] if salt else ())
        return num_blocks

    def num_settled_tokens(self) -> int:
        """Tokens whose KV is in the cache for good: verified, and not in a step that is still running."""
        request = self.request
        return min(max(request.num_computed_tokens - request.num_in_flight_tokens, 0), request.num_tokens)


class StoreScheduler:
    """Lives in the engine core."""

    def __init__(self, layout: KvStoreLayout, store: BlockStore) -> None:
        self._layout = layout
        self._store = store
        self._target_version = 0
        """As of the workers' last report; every engine starts with its target's version 0."""
        self._requests: dict[str, TrackedRequest] = {}
        self._loads: list[LoadOrder] = []
        self._last_saves: list[SaveOrder] = []
        self._uses: list[UseOrder] = []
        self._finished_ids: list[str] = []

    def begin(self, request: Request) -> None:
        self._requests[request.request_id] = TrackedRequest(request, self._layout.block_size_tokens)

    def num_promised_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """Tokens after the first `num_computed_tokens` (whole blocks) that the store can supply."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or not tracked.is_storable or tracked.had_load:
            return 0
        size = self._layout.block_size_tokens
        first = num_computed_tokens // size
        num_held = self._num_held(tracked, first, tracked.extend(request.num_tokens))
        # As in vLLM's own prefix cache: the last token is always computed, and a draft wants the last matching block anew.
        num_usable = min(num_held, (request.num_tokens - 1) // size) - int(self._layout.drops_last_block)
        tracked.promised = range(first, max(num_usable, first))
        return len(tracked.promised) * size

    def accept(self, request: Request, block_ids: list[int], num_external_tokens: int) -> None:
        """vLLM took the promise and has blocks for it."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or num_external_tokens == 0:
            return
        taken = tracked.promised[: num_external_tokens // self._layout.block_size_tokens]
        blocks = [tracked.block(position, block_ids[position]) for position in taken]
        self._loads.append(LoadOrder(request.request_id, tracked.tenant, blocks))
        tracked.had_load = tracked.is_loading = True

    def orders(self, output: SchedulerOutput) -> StepOrders:
        """Everything for the step that is about to run."""
        orders = StepOrders(saves=self._last_saves, loads=self._loads, uses=self._uses, finished_ids=self._finished_ids)
        self._last_saves, self._loads, self._uses, self._finished_ids = [], [], [], []
        size = self._layout.block_size_tokens
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            tracked = self._requests.get(request_id)
            block_ids = _block_ids(output, request_id)
            if tracked is None or block_ids is None:
                continue
            tracked.was_scheduled = True
            first = tracked.request.num_computed_tokens
            orders.begun_block_ids += block_ids[-(-first // size) : -(-(first + num_tokens) // size)]
            orders.saves += self._saves(tracked, block_ids)
        return orders

    def finish(self, request: Request, block_ids: list[int]) -> bool:
        """Whether the request's blocks must outlive it by a step, to be saved."""
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None or tracked.is_loading or not tracked.was_scheduled or not tracked.is_storable:
            return False
        num_settled = tracked.extend(tracked.num_settled_tokens())
        if num_settled:
            names = [tracked.name(position) for position in range(num_settled)]
            num_prompt_blocks = min(len(request.prompt_token_ids or ()) // self._layout.block_size_tokens, num_settled)
            self._uses.append(UseOrder(tracked.tenant, names, num_prompt_blocks))
        saves = self._saves(tracked, block_ids)
        if not saves:
            return False
        self._last_saves += saves
        self._finished_ids.append(request.request_id)
        return True

    def note(self, output: KVConnectorOutput) -> None:
        """What the workers report after a step."""
        for request_id in output.finished_recving or ():
            if request_id in self._requests:
                self._requests[request_id].is_loading = False
        if isinstance(output.kv_connector_worker_meta, StepReport):
            self._target_version = output.kv_connector_worker_meta.target_version

    def _saves(self, tracked: TrackedRequest, block_ids: list[int]) -> list[SaveOrder]:
        """Settled blocks that were not looked at yet and that the store lacks."""
        if not tracked.is_storable:
            return []
        num_settled = tracked.extend(tracked.num_settled_tokens())
        new, tracked.num_saved_blocks = range(tracked.num_saved_blocks, num_settled), max(tracked.num_saved_blocks, num_settled)
        missing = [position for position, is_there in zip(new, self._has(tracked, new), strict=True) if not is_there]
        if not missing:
            return []
        blocks = [tracked.block(position, block_ids[position]) for position in missing]
        return [SaveOrder(tracked.tenant, block_ids[: missing[-1] + 1], blocks)]

    def _num_held(self, tracked: TrackedRequest, first: int, num_blocks: int) -> int:
        """Blocks from the start on, the first `first` of them in the cache and those after it in the store."""
        return first + sum(takewhile(bool, self._has(tracked, range(first, num_blocks))))

    def _has(self, tracked: TrackedRequest, positions: range) -> Iterator[bool]:
        realm = KvRealm(self._layout.layout_hash, self._target_version, tracked.tenant)
        return self._store.has(realm, [tracked.name(position) for position in positions], self._layout.num_ranks)


def _block_ids(output: SchedulerOutput, request_id: str) -> list[int] | None:
    state = output.kv_connector_block_state
    groups = state.get_block_ids(request_id) if state is not None else None
    return groups[0] if groups is not None else None


def _tenant(request: Request) -> str:
    """As the capture reads it."""
    labels: dict[str, Any] = (request.sampling_params.extra_args if request.sampling_params is not None else None) or {}
    return tenant_label(str(labels.get("paceline_tenant") or DEFAULT_LABEL))


def _is_plain_text(request: Request) -> bool:
    """Whether token ids and salt are all that its KV depends on."""
    return (
        request.sampling_params is not None
        and request.prompt_token_ids is not None
        and request.prompt_embeds is None
        and request.lora_request is None
        and not request.mm_features
        and not request.resumable
    )
