"""How many groups may be under way, so that none is older than eta versions when it is trained on.

AReaL (arXiv 2505.24298) admits a group while `accepted + running < (eta + version + 1) * B`, with B groups to a version. That counts
since the run began: after a resume the version stands and the counts do not, and version * B groups too many are admitted at once.
Of the groups accepted, version * B were trained on in earlier versions. Taken away on both sides, what remains needs no history:

    groups running, waiting or being trained on at this version < (eta + 1) * B
"""

from __future__ import annotations

from wire.errors import ConfigError


def capacity(eta: int, groups_per_version: int, outstanding: int) -> int:
    """How many more groups may be submitted now. `outstanding`: running, waiting, or taken since the version last changed."""
    return max(0, limit(eta, groups_per_version) - outstanding)


def limit(eta: int, groups_per_version: int) -> int:
    """Groups that may be outstanding together. Raises ConfigError where eta is negative or a version has no groups."""
    if eta < 0 or groups_per_version < 1:
        raise ConfigError(
            f"eta is {eta} and groups per version are {groups_per_version}; eta is 0 (in step) or more, a version takes 1 or more"
        )
    return (eta + 1) * groups_per_version
