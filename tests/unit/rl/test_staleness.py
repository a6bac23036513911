from __future__ import annotations

import msgspec
import pytest
from rl_samples import make_group, make_trajectory

from rl.staleness.admission import capacity
from rl.staleness.distribution import staleness
from rl.staleness.ledger import Ledger, LedgerState
from rl.staleness.window import choose, window_size
from wire.errors import ConfigError, RolloutError


def fresh(version: int = 0, *, eta: int = 1, groups_per_version: int = 4) -> Ledger:
    return Ledger(LedgerState(version=version), eta=eta, groups_per_version=groups_per_version)


def submit_all(ledger: Ledger) -> list[int]:
    ids = []
    while ledger.capacity:
        ids.append(ledger.submit("sums", len(ids)).group_id)
    return ids


def finish(ledger: Ledger, group_id: int, *versions: int) -> bool:
    """By its id: `submit_all` gives each group its place as the seed of its environment."""
    return ledger.finish(make_group(group_id, versions=versions, environment_seed=group_id))


@pytest.mark.parametrize("eta", [0, 1, 3])
def test_admission_is_areals_while_nothing_resumes(eta: int) -> None:
    ledger, batch = fresh(eta=eta), 4
    accepted = 0
    for version in range(6):
        running = [ledger.submit("sums", ledger.state.next_group_id).group_id for _ in range(ledger.capacity)]
        # AReaL counts what it accepted since the run began, at any time: finished or taken or not.
        assert (eta + version + 1) * batch - (accepted + len(running)) == 0
        for group_id in running:
            assert finish(ledger, group_id, version)
        accepted += len(running)
        assert len(ledger.take(batch)) == batch
        assert ledger.capacity == (eta + version + 1) * batch - accepted == 0
        assert ledger.advance(version + 1) == ()
        assert ledger.capacity == batch


def test_a_resume_at_a_late_version_admits_no_more_than_ever() -> None:
    ledger, _ = Ledger.resume(LedgerState(version=0), 500, eta=2, groups_per_version=4)
    assert ledger.capacity == 12
    assert (2 + 500 + 1) * 4 - 0 == 2012  # what AReaL's formula says with counts that begin anew


def test_a_jump_of_versions_evicts_what_is_too_old_and_the_refills_are_admitted() -> None:
    ledger = fresh(eta=1)
    ids = submit_all(ledger)
    for group_id in ids[:3]:
        finish(ledger, group_id, 0)
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(ledger.state), type=LedgerState)
    resumed, evictions = Ledger.resume(state, 40, eta=1, groups_per_version=4)
    assert [eviction.entry.group_id for eviction in evictions] == ids
    assert [eviction.is_running for eviction in evictions] == [False] * 3 + [True] * 5
    assert resumed.capacity == 8
    for eviction in evictions:
        resumed.submit("sums", eviction.entry.environment_seed, refill_of=eviction.entry.group_id)
    assert (resumed.capacity, resumed.state.owed) == (0, ())


def test_groups_in_training_when_a_checkpoint_was_made_are_trained_on_after_it() -> None:
    ledger = fresh()
    for group_id in submit_all(ledger):
        finish(ledger, group_id, 0)
    taken = ledger.take(4)
    resumed, evictions = Ledger.resume(ledger.state, 0, eta=1, groups_per_version=4)
    assert evictions == ()
    assert resumed.take(4) == taken


def test_a_group_in_training_counts_until_the_version_changes() -> None:
    ledger = fresh(eta=0)
    for group_id in submit_all(ledger):
        finish(ledger, group_id, 0)
    ledger.take(4)
    # A group submitted now would be trained on at the next version, one behind.
    assert ledger.capacity == 0
    ledger.advance(1)
    assert ledger.capacity == 4


def test_the_oldest_token_decides_not_the_submission() -> None:
    ledger = fresh(5, eta=1)
    ids = submit_all(ledger)
    for group_id in ids[:4]:
        # The last engine to take version 5 drew its first token from version 3.
        assert finish(ledger, group_id, 3 if group_id == 1 else 5, 5)
    finish(ledger, ids[4], 5)
    assert [entry.group_id for entry in ledger.take(4)] == [0, 2, 3, 4]
    (eviction,) = ledger.state.owed
    assert (eviction.entry.group_id, eviction.reason) == (1, "too old")


def test_batches_are_taken_whole_or_not_at_all() -> None:
    ledger = fresh()
    ids = submit_all(ledger)
    for group_id in ids[:3]:
        finish(ledger, group_id, 0)
    assert ledger.take(4) == ()
    assert ledger.num_waiting == 3
    finish(ledger, ids[3], 0)
    assert len(ledger.take(4)) == 4


def test_a_group_that_was_evicted_is_not_waited_for_and_one_that_finished_finishes_once() -> None:
    ledger = fresh()
    ids = submit_all(ledger)
    ledger.evict([ids[0]], "failed")
    assert not finish(ledger, ids[0], 0)
    assert finish(ledger, ids[1], 0)
    assert not finish(ledger, ids[1], 0)
    assert not finish(ledger, 99, 0)
    # The id of a group that waits, but of another prompt: drawn before a resume.
    assert not ledger.finish(make_group(ids[2], environment_seed=12345))


def test_each_eviction_is_paid_for_once_and_attempts_are_counted() -> None:
    ledger = fresh()
    ids = submit_all(ledger)
    ledger.evict([ids[2]], "no signal")
    entry = ledger.submit("sums", 100, refill_of=ids[2])
    assert entry.attempt == 1
    ledger.evict([entry.group_id], "failed")
    with pytest.raises(RolloutError, match="no refill is owed for group 2"):
        ledger.submit("sums", 101, refill_of=ids[2])
    assert ledger.submit("sums", 101, refill_of=entry.group_id).attempt == 2


def test_misuse_is_refused() -> None:
    ledger = fresh(3)
    ids = submit_all(ledger)
    with pytest.raises(RolloutError, match="8 groups are under way and 0 in training at version 3, eta 1"):
        ledger.submit("sums", 0)
    with pytest.raises(RolloutError, match="version 3 follows version 3"):
        ledger.advance(3)
    ledger.evict(ids[:1], "failed")
    with pytest.raises(RolloutError, match=r"groups \[0, 77\] are neither"):
        ledger.evict([0, 77], "failed")
    with pytest.raises(RolloutError, match="resuming at version 2 with a ledger of version 3"):
        Ledger.resume(ledger.state, 2, eta=1, groups_per_version=4)
    with pytest.raises(RolloutError, match="ledger of schema 99"):
        Ledger(LedgerState(schema_version=99, version=0), eta=1, groups_per_version=4)
    for eta, groups in ((-1, 4), (1, 0)):
        with pytest.raises(ConfigError, match=f"eta is {eta} and groups per version are {groups}"):
            capacity(eta, groups, 0)


def test_the_window_lets_finished_groups_pass_a_slow_one_but_not_for_long() -> None:
    outstanding = list(range(10, 20))
    finished = {group_id: (True, -group_id) for group_id in outstanding if group_id != 10}
    # 10 is slow: of [10, 13) the other two go, the later one first because it finished first; then all wait.
    assert choose(outstanding, finished, 5, 3) == [12, 11]
    assert choose(outstanding, finished | {10: (True, 0)}, 5, 3) == [12, 11, 10, 15, 14]
    assert choose(outstanding, finished | {10: (True, 0)}, 4, 1) == [10, 11, 12, 13]
    assert choose(outstanding, finished | {10: (False, 0)}, 5, 3) == [10, 13, 12, 11, 16]
    assert choose(outstanding, {}, 4, 3) == []
    assert [window_size(total) for total in (1, 3, 4, 8, 20)] == [1, 1, 1, 2, 6]


def test_the_distribution_counts_from_each_trajectorys_oldest_token() -> None:
    trajectories = [make_trajectory(versions) for versions in ((9,), (9, 9), (8, 9), (6, 8, 9))]
    report = staleness(trajectories, 9)
    assert (report.p50, report.p99, report.worst) == (0, 3, 3)
    assert (report.spans_mean, report.spans_max) == (1.75, 3)
    with pytest.raises(RolloutError, match="1 versions ahead of version 8"):
        staleness(trajectories[:1], 8)
    with pytest.raises(RolloutError, match="no trajectories"):
        staleness([], 8)
