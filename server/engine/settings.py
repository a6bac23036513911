"""What our parts inside an engine process need to know: one resolved JSON file and one token, both named by environment."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from server.config import EnginePartsConfig
from wire.errors import ConfigError

CONFIG_VARIABLE = "PACELINE_ENGINE_CONFIG"
TOKEN_VARIABLE = "PACELINE_ENGINE_TOKEN"


@cache
def parts_config() -> EnginePartsConfig:
    """The resolved configuration of this engine process; raises ConfigError."""
    path = os.environ.get(CONFIG_VARIABLE)
    if not path:
        raise ConfigError(
            f"${CONFIG_VARIABLE} is not set; start engines with `paceline up`, or see `paceline plan` for their environment"
        )
    return EnginePartsConfig.read_json(Path(path))


def engine_token() -> str:
    """Bearer token of the private routes; raises ConfigError."""
    token = os.environ.get(TOKEN_VARIABLE)
    if not token:
        raise ConfigError(f"${TOKEN_VARIABLE} is not set; start engines with `paceline up`")
    return token
