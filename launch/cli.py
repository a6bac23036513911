"""The `paceline` command. Only parses and dispatches: everything else is imported by the command that needs it."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from launch.arguments import Command, bare, command, forwarded, read_config, say
from launch.cli_bench import add_bench
from launch.cli_rl import add_rl
from wire.errors import PacelineError

_DISK_ERRORS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EIO,
    errno.EEXIST,
    errno.ENOTDIR,
    errno.EISDIR,
}
"""The disk is full, read-only, forbidden or broken, or something else is in the place of a file or directory of ours."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 1 checked and found wanting, 2 not possible."""
    parser = build_parser()
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.error(_unrecognized(unknown, takes_files=hasattr(options, "config")))
    run: Command = options.command
    try:
        return run(options)
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output is gone (`paceline plan | head`); nothing may be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        print(
            f"paceline: {error}; make room or make it writable, or choose another place with --set state.dir=DIR or PACELINE_HOME",
            file=sys.stderr,
        )
        return 2


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="paceline", description="An OpenAI-compatible LLM server whose draft model keeps learning from live traffic."
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    command(commands, "up", _up, "start the whole system and watch it", detach="return as soon as it is ready")
    command(commands, "down", _down, "stop the system of this state directory")
    demo = command(commands, "demo", _demo, "set up, start, send real prompts, watch the draft learn, leave it serving")
    demo.add_argument("--minutes", type=float, help="how long to send prompts (default: until two swaps and a little longer)")
    demo.add_argument("--concurrency", type=int, default=4, help="requests in flight (default 4)")

    for name, function, help_text in (
        ("serve", _serve, "run the gateway alone (engines must be up)"),
        ("learn", _learn, "run the learner alone"),
    ):
        _add_resolved(command(commands, name, function, help_text))

    _add_draft(commands)
    model = commands.add_parser("model", help="targets on disk").add_subparsers(metavar="COMMAND", required=True)
    fetch = command(model, "fetch", _model_fetch, "build or verify a model of the catalogue")
    fetch.add_argument("name", nargs="?", help="name in the catalogue, hub id or directory (default: target.path)")

    command(commands, "plan", _plan, "print every process and start nothing", json="print JSON")
    command(commands, "doctor", _doctor, "check this machine and this installation", json="print JSON")
    command(commands, "view", _view, "watch a running system in the terminal")
    add_bench(commands)
    add_rl(commands)
    bare(commands, "version", _version, "print versions")
    return parser


def _unrecognized(words: Sequence[str], *, takes_files: bool) -> str:
    """A message in argparse's words; a configuration file among them is probably meant for `--config`."""
    files = [word for word in words if word.endswith(".toml")]
    hint = f"; configuration files follow --config: --config {' '.join(files)}" if files and takes_files else ""
    return f"unrecognized arguments: {' '.join(words)}{hint}"


def _add_resolved(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--resolved", type=Path, metavar="JSON", help="resolved configuration, as the launcher writes it")


def _add_draft(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    draft = commands.add_parser("draft", help="drafts: init, import, pretrain, list, show, activate, rollback, export")
    verbs = draft.add_subparsers(metavar="COMMAND", required=True)
    _add_resolved(command(verbs, "init", _draft_init, "make a draft: random, or from draft.checkpoint"))
    imported = command(verbs, "import", _draft_import,
                        "make a draft of a published EAGLE-3 checkpoint (SafeAILab's layout or speculators')")  # fmt: skip
    imported.add_argument("path", type=Path, metavar="PATH", help="its directory: config.json and safetensors files")
    pretrain = command(verbs, "pretrain", _draft_pretrain,
                        "start the system, train its draft on the answers to a file's prompts, and stop")  # fmt: skip
    pretrain.add_argument("--traffic", required=True, metavar="FILE",
                          help="JSON lines with OpenAI messages, or the name of a source: human_eval, sharegpt, reasoning_gym, tool_calls")  # fmt: skip
    pretrain.add_argument("--tokens", type=int, default=1_000_000, metavar="N",
                          help="token visits of the learner after which it ends (default 1000000); a plateau ends it sooner")  # fmt: skip
    pretrain.add_argument("--concurrency", type=int, default=8, help="requests in flight (default 8)")
    command(verbs, "list", _draft_list, "list drafts")
    show = command(verbs, "show", _draft_show, "verify a draft and print its manifest")
    activate = command(verbs, "activate", _draft_activate, "swap a draft into the running engines",
                        force="skip the gate's verdict; integrity checks always hold")  # fmt: skip
    activate.add_argument(
        "--expected-active", type=int, metavar="N", help="refuse if another draft is active (default: as on disk)"
    )
    command(verbs, "rollback", _draft_rollback, "go back to the previous draft")
    export = command(verbs, "export", _draft_export, "write a stand-alone EAGLE-3 checkpoint")
    for parser in (show, activate, export):
        parser.add_argument("version", type=int)
    export.add_argument("out_dir", type=Path)


def _up(options: argparse.Namespace) -> int:
    from launch import up

    config = read_config(options)
    if options.detach:
        from launch.detached import start_and_wait

        start_and_wait(config, forwarded(options), say)
        return 0
    return up.up(config, say)


def _down(options: argparse.Namespace) -> int:
    from launch.up import down

    config = read_config(options)
    return down(config.state.directory, config.launch.grace_s, say)


def _demo(options: argparse.Namespace) -> int:
    from launch.demo import demo

    return demo(read_config(options), forwarded(options), minutes=options.minutes, concurrency=options.concurrency)


def _serve(options: argparse.Namespace) -> int:
    from launch.roles import run_gateway

    return run_gateway(options.resolved or _role_file(options, "gateway"))


def _learn(options: argparse.Namespace) -> int:
    from launch.roles import run_learner

    return run_learner(options.resolved or _role_file(options, "learner"))


def _role_file(options: argparse.Namespace, role: str) -> Path:
    """The role's resolved configuration as the last `up` of this state directory wrote it."""
    from launch.rundir import RunDir

    return RunDir(read_config(options).state.directory).role_file(role)


def _model_fetch(options: argparse.Namespace) -> int:
    from launch import models
    from launch.progress import bar

    path = options.name or read_config(options).target.path
    with bar(f"fetching {path}") as report:
        directory = models.resolve(path, report)
    say(str(directory))
    return 0


def _plan(options: argparse.Namespace) -> int:
    from launch import host, models
    from launch.plan import make_plan
    from launch.plan_text import plan_as_json, plan_as_text
    from launch.rundir import make_tokens

    config = read_config(options)
    target_dir = models.expected_directory(config.target.path) or Path(config.target.path)
    plan = make_plan(host.with_ports(config), host.gather(), make_tokens(os.environ), target_dir=target_dir)
    say(plan_as_json(plan) if options.json else plan_as_text(plan))
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from launch.doctor import doctor

    return doctor(read_config(options), as_json=options.json)


def _view(options: argparse.Namespace) -> int:
    from launch.view import watch

    return watch(read_config(options).state.directory)


def _draft_init(options: argparse.Namespace) -> int:
    from launch import drafts
    from wire.store import DraftStore

    config = read_config(options)
    version = drafts.init(config)
    equal = drafts.first_equal(DraftStore(config.state.directory), version)
    say(f"draft {version}" if equal is None else f"draft {version}, equal to draft {equal}: what it was made of is the same")
    return 0


def _draft_import(options: argparse.Namespace) -> int:
    from launch import drafts
    from wire.store import DraftStore

    config = read_config(options)
    version = drafts.import_checkpoint(config, options.path)
    say(f"draft {version} from {options.path}: {drafts.how_to_serve(DraftStore(config.state.directory), version)}")
    return 0


def _draft_pretrain(options: argparse.Namespace) -> int:
    from launch.pretrain import pretrain

    return pretrain(
        read_config(options),
        forwarded(options),
        options.traffic,
        num_tokens=options.tokens,
        concurrency=options.concurrency,
        say=say,
    )


def _draft_list(options: argparse.Namespace) -> int:
    from launch import drafts
    from wire.store import DraftStore

    lines = drafts.listing(DraftStore(read_config(options).state.directory))
    say("\n".join(lines) if lines else "no drafts yet; `paceline draft init` makes one")
    return 0


def _draft_show(options: argparse.Namespace) -> int:
    from launch import drafts
    from wire.store import DraftStore

    say(drafts.show(DraftStore(read_config(options).state.directory), options.version))
    return 0


def _draft_activate(options: argparse.Namespace) -> int:
    from launch import drafts

    state_dir = read_config(options).state.directory
    say(drafts.activate(state_dir, options.version, expected_active=options.expected_active, force=options.force))
    return 0


def _draft_rollback(options: argparse.Namespace) -> int:
    from launch import drafts

    say(drafts.rollback(read_config(options).state.directory))
    return 0


def _draft_export(options: argparse.Namespace) -> int:
    from launch import drafts
    from wire.store import DraftStore

    drafts.export(DraftStore(read_config(options).state.directory), options.version, options.out_dir)
    say(str(options.out_dir))
    return 0


def _version(_options: argparse.Namespace) -> int:
    from launch.provenance import git_revision, versions

    for name, version in versions().items():
        say(f"{name} {version}")
    revision = git_revision()
    if revision:
        say(f"git {revision}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
