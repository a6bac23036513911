"""What the commands of the command line have in common: their options, their configuration, their output."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launch.config import SystemConfig

Command = Callable[[argparse.Namespace], int]
"""Returns the exit code: 0 done, 1 checked and found wanting, 2 not possible."""


def command(commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, function: Command, help_text: str,
            **flags: str) -> argparse.ArgumentParser:  # fmt: skip
    """A command that reads the system's configuration. `flags` are further switches of it, by name, with their help."""
    parser = bare(commands, name, function, help_text)
    parser.add_argument(
        "--config", nargs="+", type=Path, default=[], metavar="FILE", help="TOML files, later ones win (default: built in)"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="A.B=VALUE", dest="overrides", help="override one setting"
    )
    for flag, flag_help in flags.items():
        parser.add_argument(f"--{flag}", action="store_true", help=flag_help)
    return parser


def bare(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, function: Command, help_text: str
) -> argparse.ArgumentParser:
    """A command that does not read the system's configuration."""
    parser = commands.add_parser(name, help=help_text, description=help_text[0].upper() + help_text[1:] + ".")
    parser.set_defaults(command=function)
    return parser


def read_config(options: argparse.Namespace) -> SystemConfig:
    """The configuration of this command line; raises ConfigError."""
    from launch.config import SystemConfig

    resolved: Path | None = getattr(options, "resolved", None)
    if resolved is not None:
        return SystemConfig.read_json(resolved)
    return SystemConfig.load(options.config, options.overrides)


def forwarded(options: argparse.Namespace) -> list[str]:
    """The configuration options of this command line, for another command."""
    files = ["--config", *(str(path.absolute()) for path in options.config)] if options.config else []
    return files + [word for text in options.overrides for word in ("--set", text)]


def say(text: str) -> None:
    """Print at once, into a pipe too."""
    print(text, flush=True)
