"""`python -m launch.grow CONFIG.json`: drafts that exist get a vocabulary of `draft.vocab_size` tokens. A child of `paceline up`,
because it imports torch. No engine may run: each is built for one size.
"""

from __future__ import annotations

import sys
from pathlib import Path

from launch.config import SystemConfig
from launch.drafts import target_and_spec
from wire.errors import PacelineError
from wire.store import DraftStore


def of_another_size(store: DraftStore, vocab_size: int) -> list[int]:
    """Of the floor and the active draft those that engines with this `draft.vocab_size` cannot load; raises ArtifactError."""
    versions = dict.fromkeys(version for version in (store.floor(), store.active()) if version is not None)
    return [version for version in versions if store.manifest(version).spec.draft_vocab_size != vocab_size]


def grow(config: SystemConfig) -> dict[int, int]:
    """New versions by the old ones they take the place of; raises PacelineError."""
    from drafter.create import grow_draft

    store = DraftStore(config.state.directory)
    target_dir, spec = target_and_spec(config)
    floor, active = store.floor(), store.active()
    made = {version: grow_draft(store, version, spec, target_dir) for version in of_another_size(store, spec.draft_vocab_size)}
    for version, larger in made.items():
        if version == floor:
            store.set_floor(larger)
        if version == active:
            store.set_active(larger)
    return made


if __name__ == "__main__":
    try:
        grow(SystemConfig.read_json(Path(sys.argv[1])))
    except PacelineError as error:
        sys.exit(str(error))
