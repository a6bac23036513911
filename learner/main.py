"""The learner role: receive, remember, train, gate, publish, report. `python -m learner.main CONFIG.json` runs it."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

import torch

from learner.config import LearnerConfig
from learner.device import choose_device
from learner.ranks import OneRank
from learner.session import LearningSession, MakeTrainer
from learner.start import wait_for_draft
from learner.trainer import Trainer
from wire.errors import PacelineError

log = logging.getLogger(__name__)

_IDLE_S = 0.2


def main(config: LearnerConfig) -> int:
    """Run until SIGTERM or SIGINT; returns the exit status. Niceness and threads are set before any work."""
    settings = config.learner
    os.nice(max(settings.nice - os.nice(0), 0))
    torch.set_num_threads(settings.num_threads)
    if settings.num_processes > 1:
        from learner.processes import run_rank  # torch.distributed, only where it is used

        return run_rank(config, lead)
    device = choose_device(settings.device, num_gpus=torch.cuda.device_count())
    return lead(config, partial(Trainer, ranks=OneRank(device)))


def lead(config: LearnerConfig, make_trainer: MakeTrainer) -> int:
    """All a learner does; the processes it may have besides only train along."""
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    version = wait_for_draft(config.state_dir, stopping)
    if version is None:
        return 0
    session = LearningSession(config, version, make_trainer)
    log.info("learner listens on %s, starts from %s, on %s", session.receiver.endpoint, session.origin, session.trainer.device)
    try:
        run(session, stopping)
    finally:
        session.close()
    return 0


def run(session: LearningSession, stopping: threading.Event) -> None:
    """The loop. Each line is one owner's work; none of them waits for serving, and serving waits for none of them."""
    while not stopping.is_set():
        session.receive()
        if session.is_paused:
            session.rest("paused", _IDLE_S)
        elif not session.train():
            session.rest("waiting", _IDLE_S)
        if session.gate_is_due():
            session.gate()
        if session.checkpoint_is_due():
            session.checkpoint()


def run_from_command_line() -> int:
    """`python -m learner.main CONFIG.json`: the exit status, with one line on stderr for an error of the user's."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if len(sys.argv) != 2:
        print("usage: python -m learner.main CONFIG.json", file=sys.stderr)
        return 2
    started_s = time.monotonic()
    try:
        return main(LearnerConfig.read_json(Path(sys.argv[1])))
    except PacelineError as error:
        print(f"learner: {error}", file=sys.stderr)
        return 1
    except Exception:
        log.exception(
            "the learner died after %.0f s; its supervisor restarts it from the checkpoint", time.monotonic() - started_s
        )
        return 1


if __name__ == "__main__":
    sys.exit(run_from_command_line())
