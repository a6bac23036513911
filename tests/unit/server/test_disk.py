"""Disk: whoever waits for it is counted, and nobody else is."""

from __future__ import annotations

import asyncio
import threading

import pytest

from server.disk import MAX_WAITING, Disk


def test_a_machine_that_was_out_of_threads_has_its_disk_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def scenario() -> None:
        disk = Disk()
        with monkeypatch.context() as out_of_threads:
            out_of_threads.setattr(threading.Thread, "start", refuse)
            for _ in range(MAX_WAITING):
                with pytest.raises(RuntimeError, match="new thread"):
                    await disk.do(lambda: 1)
        assert await disk.do(lambda: 2) == 2

    asyncio.run(scenario())
