"""HostRows: tensors on their way from the device to host memory."""

from __future__ import annotations

import torch


class HostRows:
    """Selected rows on their way to host memory; `get` waits for them.

    Cloned on the computing stream: the runner reuses its buffers at the next step, and CUDA graphs replay into them.
    """

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if any(tensor.is_cuda for tensor in tensors):
            tensors = tuple(tensor.to("cpu", non_blocking=True) for tensor in tensors)
            self._event = torch.cuda.Event()
            self._event.record()
        self._tensors = tensors

    def get(self) -> tuple[torch.Tensor, ...]:
        """The tensors on the host, once their copies have arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors
