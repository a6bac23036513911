"""Depth at run time: K changes between steps, never the output."""

from __future__ import annotations

import threading
import time

from live_engine import LiveEngine

PROMPTS = [f"depth prompt {i}: " for i in range(6)]


def test_an_engine_whose_schedule_shrinks_starts_with_full_depth_for_every_batch_size(tiny_engine: LiveEngine) -> None:
    tiny_engine.settle()
    tiny_engine.listener.clear()
    tiny_engine.complete_all(PROMPTS)
    tiny_engine.settle()
    depths = {span.num_proposed for item in tiny_engine.listener.captured for span in item.message.spans}
    assert depths == {0, 3}  # 0: the prompts


def test_depth_changes_under_load_leave_every_token_as_it_was(tiny_engine: LiveEngine) -> None:
    reference = tiny_engine.complete_all(PROMPTS, max_tokens=150)
    tiny_engine.settle()
    tiny_engine.listener.clear()
    done = threading.Event()

    def vary() -> None:
        while not done.is_set():
            for depth in (0, 3, 1, 2):
                tiny_engine.set_depth(depth)
                time.sleep(0.05)

    thread = threading.Thread(target=vary)
    thread.start()
    try:
        varied = tiny_engine.complete_all(PROMPTS, max_tokens=150)
    finally:
        done.set()
        thread.join()
        tiny_engine.set_depth(3)
    tiny_engine.settle()
    assert [completion.token_ids for completion in varied] == [completion.token_ids for completion in reference]
    depths = {span.num_proposed for item in tiny_engine.listener.captured for span in item.message.spans}
    assert depths == {0, 1, 2, 3}


def test_an_impossible_depth_is_refused(tiny_engine: LiveEngine) -> None:
    for depth in (-1, 4, "3", None):
        status, answer = tiny_engine.call("/paceline/depth", {"depth": depth})
        assert status == 400
        assert answer["error"]["message"]
    assert tiny_engine.ok("/paceline/status")["depth"] == 3
