"""The gateway role: `python -m server.main CONFIG.json`. Tokens come from the environment, everything else from the file."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import uvicorn
from prometheus_client import disable_created_metrics

from server.config import GatewayConfig
from server.connections import raise_file_limit
from server.gateway import Gateway, bind
from wire.environment import ENGINE_TOKEN_VARIABLE, OPERATOR_TOKEN_VARIABLE
from wire.errors import ConfigError

logger = logging.getLogger(__name__)


def main(config: GatewayConfig) -> int:
    """Serve until SIGTERM or SIGINT; raises ConfigError."""
    # The time a counter was made doubles the page and tells nobody anything.
    disable_created_metrics()
    operator_token, engine_token = _token(OPERATOR_TOKEN_VARIABLE), _token(ENGINE_TOKEN_VARIABLE)
    raise_file_limit()
    settings = config.gateway
    public, admin = bind(settings.host, settings.port), bind(settings.admin_host, settings.admin_port)
    logger.info("gateway on %s:%d, admin on %s:%d", *public.getsockname()[:2], *admin.getsockname()[:2])

    async def run() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        gateway = Gateway(config, operator_token=operator_token, engine_token=engine_token)
        await gateway.serve(public, admin, stop)

    # uvicorn's choice: uvloop where it is installed.
    factory: Callable[[], asyncio.AbstractEventLoop] | None = uvicorn.Config(
        "server.main:main", log_config=None
    ).get_loop_factory()
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(run())
    return 0


def _token(name: str) -> str:
    token = os.environ.get(name, "")
    if len(token) < 8 or not token.isascii() or not token.isprintable():
        raise ConfigError(f"${name} must hold a token of at least 8 printable characters; `paceline up` makes one")
    return token


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if len(sys.argv) != 2:
        sys.exit("usage: python -m server.main CONFIG.json")
    try:
        sys.exit(main(GatewayConfig.read_json(Path(sys.argv[1]))))
    except ConfigError as problem:
        logger.error("%s", problem)
        sys.exit(2)
