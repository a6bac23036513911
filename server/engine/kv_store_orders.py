"""What the scheduler's side of the KV store tells its workers each step, and what they tell back.

vLLM carries these between its own processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata


@dataclass(frozen=True)
class BlockOrder:
    """One block of a prefix, in the store and in the cache."""

    name: str
    parent: str
    position: int
    block_id: int


@dataclass(frozen=True)
class SaveOrder:
    """Blocks of one request whose tokens are settled and whose KV is in the cache."""

    tenant: str
    prefix_block_ids: list[int]
    """The request's blocks from the first on, up to the last of `blocks`."""
    blocks: list[BlockOrder]


@dataclass(frozen=True)
class LoadOrder:
    """Consecutive blocks to load for a request that waits for them."""

    request_id: str
    tenant: str
    blocks: list[BlockOrder]


@dataclass(frozen=True)
class UseOrder:
    """A prefix that a request which has ended was computed with."""

    tenant: str
    names: list[str]
    num_prompt_blocks: int
    """How many of its first blocks are of the prompt alone."""


@dataclass
class StepOrders(KVConnectorMetadata):
    """scheduler -> workers, once a step."""

    begun_block_ids: list[int] = field(default_factory=list)
    """Blocks whose first token is computed in this step."""
    saves: list[SaveOrder] = field(default_factory=list)
    loads: list[LoadOrder] = field(default_factory=list)
    uses: list[UseOrder] = field(default_factory=list)
    finished_ids: list[str] = field(default_factory=list)
    """Requests whose blocks wait for this step's saves to be freed."""


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """workers -> scheduler, once a step."""

    target_version: int

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReport:
        """All ranks change the version in one call between two steps, so they agree."""
        return self
