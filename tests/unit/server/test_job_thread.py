from __future__ import annotations

import threading

import pytest

from server.engine.job_thread import JobThread


def test_jobs_are_done_in_order_and_all_of_them_before_the_end() -> None:
    may_go_on = threading.Event()
    done: list[int] = []

    def do(job: int) -> None:
        may_go_on.wait(60)
        done.append(job)

    thread = JobThread("jobs", do, lambda _job: None)
    for job in range(5):
        thread.put(job)
    assert thread.num_queued >= 4
    may_go_on.set()
    thread.close()
    assert done == [0, 1, 2, 3, 4]
    assert thread.num_queued == 0


@pytest.mark.parametrize("error", [OSError("no space left"), ValueError("odd")])
def test_a_job_that_fails_is_given_up_and_the_next_is_done(error: Exception) -> None:
    done: list[str] = []
    given_up: list[str] = []

    def do(job: str) -> None:
        if job == "bad":
            raise error
        done.append(job)

    thread = JobThread("jobs", do, given_up.append)
    for job in ("first", "bad", "last"):
        thread.put(job)
    thread.close()
    assert (done, given_up) == (["first", "last"], ["bad"])
