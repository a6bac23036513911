"""What our parts inside an engine process need to know: one resolved JSON and one token, both in the environment."""

from __future__ import annotations

import json
import os
from functools import cache

from server.config import EnginePartsConfig
from wire.environment import ENGINE_TOKEN_VARIABLE
from wire.errors import ConfigError

CONFIG_VARIABLE = "PACELINE_ENGINE_CONFIG"


@cache
def parts_config() -> EnginePartsConfig:
    """The resolved configuration of this engine process; raises ConfigError."""
    text = os.environ.get(CONFIG_VARIABLE)
    if not text:
        raise ConfigError(
            f"${CONFIG_VARIABLE} is not set; start engines with `paceline up`, or see `paceline plan` for their environment"
        )
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"${CONFIG_VARIABLE} is not JSON: {error}") from error
    return EnginePartsConfig.build(data, source=f"${CONFIG_VARIABLE}")


def engine_token() -> str:
    """Bearer token of the private routes; raises ConfigError."""
    token = os.environ.get(ENGINE_TOKEN_VARIABLE)
    if not token:
        raise ConfigError(f"${ENGINE_TOKEN_VARIABLE} is not set; start engines with `paceline up`")
    return token
