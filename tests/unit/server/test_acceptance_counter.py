from __future__ import annotations

from server.engine.acceptance import AcceptanceCounter


def steps_of(counter: AcceptanceCounter, version: int) -> int:
    return sum(count.num_verify_steps for count in counter.snapshot() if count.draft_version == version)


def test_an_old_draft_that_serves_again_is_counted_in_full() -> None:
    counter = AcceptanceCounter(max_depth=3)
    for version in range(40):
        counter.add(version, "a", "x", 3, 1)
    for _ in range(100):
        counter.add(0, "a", "x", 3, 1)
        counter.add(0, "b", "x", 3, 2)
    assert steps_of(counter, 0) == 200


def test_versions_are_forgotten_that_served_longest_ago() -> None:
    counter = AcceptanceCounter(max_depth=3)
    counter.add(5, "a", "x", 3, 1)
    for version in range(10, 40):
        counter.add(version, "a", "x", 3, 1)
        counter.add(5, "a", "x", 3, 1)
    versions = {count.draft_version for count in counter.snapshot()}
    assert len(versions) == 16
    assert versions == {5, *range(25, 40)}
