"""`paceline rl`: parses and dispatches its commands; what they need is imported by the one that needs it."""

from __future__ import annotations

import argparse
from pathlib import Path

from launch.arguments import Command, bare, forwarded, read_config, say


def add_rl(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    rl = commands.add_parser("rl", help="train the target on environments: run, why, replay")
    verbs = rl.add_subparsers(metavar="COMMAND", required=True)
    help_text = "train the target: start the system or join the one that runs, begin the run or go on with it"
    _configured(verbs, "run", _run, help_text, files="+")
    help_text = "say what limits a run and what is wrong with it; with --group why one was used, dropped or waits"
    why = _configured(verbs, "why", _why, help_text, files="*")
    why.add_argument(
        "--group", metavar="GROUP[.SAMPLE]", help="a group by its id, or one of its rollouts and who made its tokens"
    )

    help_text = "make one step of a run again from disk, without engines, and compare its report"
    replay = _configured(verbs, "replay", _replay, help_text, files="+")
    replay.add_argument("--step", type=int, required=True, metavar="N", help="as the run's lines number it, from 1")


def _configured(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser], name: str, function: Command, help_text: str, *, files: str
) -> argparse.ArgumentParser:
    parser = bare(verbs, name, function, help_text)
    parser.add_argument("config", nargs=files, type=Path, metavar="CONFIG", help="TOML files, later ones win")
    parser.add_argument(
        "--set", action="append", default=[], metavar="A.B=VALUE", dest="overrides", help="override one setting"
    )
    return parser


def _run(options: argparse.Namespace) -> int:
    from launch.rl import train

    return train(read_config(options), forwarded(options), say)


def _why(options: argparse.Namespace) -> int:
    from rl.run.why import why

    config = read_config(options)
    for line in why(config.state.directory, config.rl.name, options.group):
        say(line)
    return 0


def _replay(options: argparse.Namespace) -> int:
    from launch import models
    from launch.rl import use_threads

    config = read_config(options)
    use_threads(config.rl.num_threads)
    from rl.run.again import replay_step  # after the number of threads is said: torch reads it when it is imported

    target_dir = models.resolve(config.target.path, lambda _what, _share: None)
    for line in replay_step(config.state.directory, config.rl.name, target_dir, options.step):
        say(line)
    return 0
