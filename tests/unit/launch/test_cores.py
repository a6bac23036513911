from __future__ import annotations

import pytest

from launch.config import SystemConfig
from launch.cores import share_cores
from wire.errors import ConfigError


def config(num_pools: int = 1, *, learner: bool = True, threads: int = 1, processes: int = 1) -> SystemConfig:
    pools = [{"id": f"e{index}", "port": 0} for index in range(num_pools)]
    settings = {"enabled": learner, "num_threads": threads, "num_processes": processes}
    return SystemConfig.build({"pool": pools, "learner": settings}, source="test")


def test_two_cores_are_one_for_the_engine_and_one_for_the_learner() -> None:
    shares = share_cores(config(), (0, 1))
    assert (shares.pools, shares.learner) == ({"e0": (0,)}, (1,))


def test_one_core_is_shared() -> None:
    shares = share_cores(config(), (5,))
    assert (shares.pools, shares.learner) == ({"e0": (5,)}, ())


def test_two_engines_never_share_a_core_while_there_are_two() -> None:
    shares = share_cores(config(2), (0, 1))
    assert shares.pools == {"e0": (0,), "e1": (1,)}


def test_a_learner_without_a_core_of_its_own_may_use_what_any_core_has_left() -> None:
    assert share_cores(config(2), (0, 1)).learner == ()


def test_many_cores_are_split_evenly_and_one_is_left_to_http() -> None:
    shares = share_cores(config(2, threads=2), tuple(range(8)))
    assert shares.pools == {"e0": (0, 1, 2), "e1": (3, 4)}
    assert shares.learner == (6, 7)


def test_each_process_of_the_learner_has_cores_of_its_own() -> None:
    assert share_cores(config(threads=2, processes=2), tuple(range(8))).learner == (4, 5, 6, 7)


def test_without_a_learner_the_engine_takes_its_core() -> None:
    assert share_cores(config(learner=False), (0, 1)).pools == {"e0": (0, 1)}


def test_chosen_cores_are_kept_from_the_others() -> None:
    pools = [{"id": "a", "port": 0, "cores": [2]}, {"id": "b", "port": 0}]
    shares = share_cores(SystemConfig.build({"pool": pools}, source="test"), (0, 1, 2))
    assert shares.pools == {"a": (2,), "b": (0,)}
    assert shares.learner == (1,)


def test_a_core_that_is_not_there_is_refused() -> None:
    chosen = SystemConfig.build({"pool": [{"id": "a", "port": 0, "cores": [9]}]}, source="test")
    with pytest.raises(ConfigError, match=r"pool a: cores \[9\] are not available"):
        share_cores(chosen, (0, 1))
