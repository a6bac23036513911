"""Depth at run time: K changes between steps, never the output."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from live_engine import Completion, LiveEngine
from waiting import wait_until

from wire.messages import StepTime

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

    def depths_seen() -> set[int]:
        return {span.num_proposed for item in list(tiny_engine.listener.captured) for span in item.message.spans}

    def vary() -> None:
        """Until each depth has been in force with steps in flight, five times over."""
        for _ in range(5):
            for depth in (0, 3, 1, 2):
                tiny_engine.set_depth(depth)
                num_captured = len(tiny_engine.listener.captured)
                wait_until(lambda before=num_captured: len(tiny_engine.listener.captured) > before + 2)

    try:
        with ThreadPoolExecutor(1) as pool:
            varying = pool.submit(vary)
            while not varying.done():
                varied = tiny_engine.complete_all(PROMPTS, max_tokens=150)
                assert [each.token_ids for each in varied] == [each.token_ids for each in reference]
            varying.result()
    finally:
        tiny_engine.set_depth(3)
    tiny_engine.settle()
    assert depths_seen() == {0, 1, 2, 3}


def test_depth_by_batch_size_follows_the_batch_and_leaves_every_token_as_it_was(tiny_engine: LiveEngine) -> None:
    """Requests of different lengths leave one by one, so that every batch size and every change between two depths occurs.

    Sampled tokens too: what a change of depth leaves behind must not reach the CPU's random sampler as a placeholder.
    """
    by_size = [3, 0, 2, 1, 0, 3, 1, 2]

    def complete(temperature: float) -> list[Completion]:
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            return list(
                pool.map(
                    lambda numbered: tiny_engine.complete(
                        numbered[1], max_tokens=30 + 25 * numbered[0], temperature=temperature
                    ),
                    enumerate(PROMPTS),
                )
            )

    def seen() -> set[int]:
        return {span.num_proposed for item in list(tiny_engine.listener.captured) for span in item.message.spans}

    def every_size_seen() -> bool:
        """A quick engine may end one request before the last one comes: then they come again."""
        sampled.extend(complete(1.0))
        tiny_engine.settle()
        return seen() == set(by_size)

    sampled: list[Completion] = []
    reference = complete(0.0)
    try:
        assert tiny_engine.ok("/paceline/depth", {"depth": by_size}) == {"depths": by_size}
        status = tiny_engine.ok("/paceline/status")
        assert (status["depth"], status["depths"]) == (3, by_size)
        tiny_engine.settle()
        tiny_engine.listener.clear()
        assert [each.token_ids for each in complete(0.0)] == [each.token_ids for each in reference]
        wait_until(every_size_seen)
    finally:
        tiny_engine.set_depth(3)
    for each in sampled:
        assert min(each.token_ids) >= 0
        tiny_engine.tokens_by_position(each)


def test_decode_steps_are_timed_by_batch_size_and_depth(tiny_engine: LiveEngine) -> None:
    def counted() -> dict[tuple[int, int], StepTime]:
        return {(each.bucket, each.depth): each for each in tiny_engine.fresh_stats().step_times}

    def grown(bucket: int, depth: int) -> tuple[int, float]:
        none = StepTime(bucket=bucket, depth=depth, num_steps=0, total_s=0.0)
        then, now = before.get((bucket, depth), none), counted().get((bucket, depth), none)
        return now.num_steps - then.num_steps, now.total_s - then.total_s

    def four_at_once() -> int:
        """Steps of four, which a quick engine may not have if it ends one request before the next one comes."""
        tiny_engine.complete_all(PROMPTS[:4], max_tokens=150)
        return grown(4, 3)[0]

    before, began_s = counted(), time.monotonic()
    tiny_engine.set_depth(0)
    tiny_engine.complete("alone: ", max_tokens=64)
    tiny_engine.set_depth(3)
    tiny_engine.complete("alone: ", max_tokens=64)
    plain, speculative = grown(1, 0), grown(1, 3)
    assert 55 <= plain[0] < 64
    assert 5 <= speculative[0] < 64
    wait_until(lambda: four_at_once() >= 5)
    in_fours = grown(4, 3)
    after, duration_s = counted(), time.monotonic() - began_s
    total_s = sum(now.total_s for now in after.values()) - sum(then.total_s for then in before.values())
    assert 0.0 < total_s < duration_s
    assert all(total_s > 0.0 for _, total_s in (plain, speculative, in_fours))


def test_an_impossible_depth_is_refused(tiny_engine: LiveEngine) -> None:
    for depth in (-1, 4, "3", None, [3] * 7, [3] * 9, [], [0] * 7 + [4]):
        status, answer = tiny_engine.call("/paceline/depth", {"depth": depth})
        assert status == 400
        assert answer["error"]["message"]
    assert tiny_engine.ok("/paceline/status")["depths"] == [3] * 8
