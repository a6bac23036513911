"""Before there is a session: waiting for the first draft, so that the learner may start before anything else."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from wire.store import DraftStore

log = logging.getLogger(__name__)

_STORE_POLL_S = 1.0


def wait_for_draft(state_dir: Path, stopping: threading.Event) -> int | None:
    """The version to start from: the active one, else the newest. Waits until there is one; None when told to stop."""
    store = DraftStore(state_dir)
    is_told = False
    while not stopping.is_set():
        version = store.active()
        versions = store.versions()
        if version is not None or versions:
            return version if version is not None else versions[-1]
        if not is_told:
            log.info("no draft in %s yet; waiting for `paceline draft init` or `paceline up`", store.root)
            is_told = True
        stopping.wait(_STORE_POLL_S)
    return None
