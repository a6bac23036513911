"""Orders from the leading rank to the others, and how they travel: a msgpack header, then the raw bytes of its tensors."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgspec
import torch
from msgspec import Struct
from torch import Tensor
from torch import distributed as dist

from drafter.geometry import DraftGeometry
from learner.request import CapturedRequest

_SIZE_BYTES = 8
_WAIT = timedelta(days=365)
"""For an order: without traffic there is none. A rank that dies closes its connections, which ends the wait."""
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool)}


class Start(Struct, frozen=True, tag="start"):
    """Build the trainer from this draft."""

    geometry: DraftGeometry
    tensors: dict[str, Tensor]
    """By the names of a draft's checkpoint."""


class Learn(Struct, frozen=True, tag="learn"):
    """One step, on these requests. `weight` 0 goes to a rank for which the batch has none: it computes along, and adds nothing."""

    requests: tuple[CapturedRequest, ...]
    weight: float
    rate_share: float
    rate_scale: float
    forgotten: tuple[str, ...]
    """Keys of requests that are remembered no longer."""


class UseHead(Struct, frozen=True, tag="head"):
    """Train against the target's head rows [U] of these ids from now on."""

    ids_U: Tensor


class Gather(Struct, frozen=True, tag="gather"):
    """Help to gather the whole state."""


class GatherAverage(Struct, frozen=True, tag="average"):
    """Help to gather the average of the weights."""


class Load(Struct, frozen=True, tag="load"):
    """Take over a whole state."""

    tensors: dict[str, Tensor]


class Stop(Struct, frozen=True, tag="stop"):
    """Nothing comes after it."""


Order = Start | Learn | UseHead | Gather | GatherAverage | Load | Stop


class OrderChannel:
    """From rank 0 to each other rank, over gloo. Raises RuntimeError where the other end is gone."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=_WAIT)

    def send(self, order: Order, rank: int) -> None:
        payload = torch.frombuffer(bytearray(encode(order)), dtype=torch.uint8)
        dist.send(torch.tensor([payload.numel()]), rank, self._group)
        dist.send(payload, rank, self._group)

    def receive(self) -> Order:
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, 0, self._group)
        payload = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(payload, 0, self._group)
        return decode(payload)


def encode(order: Order) -> bytes:
    """Length of the header, the header, the tensors' bytes."""
    frames: list[bytes] = []

    def announce(value: Any) -> dict[str, Any]:
        if not isinstance(value, Tensor):
            raise NotImplementedError(f"a {type(value).__name__} does not travel between ranks")
        frame = value.detach().cpu().contiguous()
        frames.append(frame.reshape(-1).view(torch.uint8).numpy().tobytes())
        return {"dtype": str(value.dtype), "shape": list(value.shape)}

    header = msgspec.msgpack.encode(order, enc_hook=announce)
    return b"".join([len(header).to_bytes(_SIZE_BYTES, "little"), header, *frames])


def decode(payload: Tensor) -> Order:
    """The order in a vector of bytes; its tensors are copies. Tensors lie in the order in which the header names them."""
    start = _SIZE_BYTES + int.from_bytes(payload[:_SIZE_BYTES].numpy().tobytes(), "little")
    header = payload[_SIZE_BYTES:start].numpy().tobytes()

    def read(kind: type, announced: Any) -> Tensor:
        nonlocal start
        tensor = torch.empty(announced["shape"], dtype=_DTYPES[announced["dtype"]])
        end = start + tensor.nbytes
        tensor.view(-1).view(torch.uint8).copy_(payload[start:end])
        start = end
        return tensor

    order: Order = msgspec.msgpack.decode(header, type=Order, dec_hook=read)
    return order
