"""The `paceline` command. Only parses and dispatches: everything else is imported by the command that needs it."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from wire.errors import PacelineError

if TYPE_CHECKING:
    from launch.config import SystemConfig

_DISK_ERRORS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EIO,
    errno.EEXIST,
    errno.ENOTDIR,
    errno.EISDIR,
}
"""The disk is full, read-only, forbidden or broken, or something else is in the place of a file or directory of ours."""

Command = Callable[[argparse.Namespace], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 1 checked and found wanting, 2 not possible."""
    parser = build_parser()
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.error(_unrecognized(unknown, takes_files=hasattr(options, "config")))
    command: Command = options.command
    try:
        return command(options)
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

    _command(commands, "up", _up, "start the whole system and watch it", detach="return as soon as it is ready")
    _command(commands, "down", _down, "stop the system of this state directory")
    demo = _command(commands, "demo", _demo, "set up, start, send real prompts, watch the draft learn, leave it serving")
    demo.add_argument("--minutes", type=float, help="how long to send prompts (default: until two swaps and a little longer)")
    demo.add_argument("--concurrency", type=int, default=4, help="requests in flight (default 4)")

    for name, function, help_text in (
        ("serve", _serve, "run the gateway alone (engines must be up)"),
        ("learn", _learn, "run the learner alone"),
    ):
        _add_resolved(_command(commands, name, function, help_text))

    _add_draft(commands)
    model = commands.add_parser("model", help="targets on disk").add_subparsers(metavar="COMMAND", required=True)
    fetch = _command(model, "fetch", _model_fetch, "build or verify a model of the catalogue")
    fetch.add_argument("name", nargs="?", help="name in the catalogue, hub id or directory (default: target.path)")

    _command(commands, "plan", _plan, "print every process and start nothing", json="print JSON")
    _command(commands, "doctor", _doctor, "check this machine and this installation", json="print JSON")
    _command(commands, "view", _view, "watch a running system in the terminal")
    _add_bench(commands)
    _bare(commands, "version", _version, "print versions")
    return parser


def _unrecognized(words: Sequence[str], *, takes_files: bool) -> str:
    """A message in argparse's words; a configuration file among them is probably meant for `--config`."""
    files = [word for word in words if word.endswith(".toml")]
    hint = f"; configuration files follow --config: --config {' '.join(files)}" if files and takes_files else ""
    return f"unrecognized arguments: {' '.join(words)}{hint}"


def _command(commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, function: Command, help_text: str,
             **flags: str) -> argparse.ArgumentParser:  # fmt: skip
    parser = _bare(commands, name, function, help_text)
    parser.add_argument(
        "--config", nargs="+", type=Path, default=[], metavar="FILE", help="TOML files, later ones win (default: built in)"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="A.B=VALUE", dest="overrides", help="override one setting"
    )
    for flag, flag_help in flags.items():
        parser.add_argument(f"--{flag}", action="store_true", help=flag_help)
    return parser


def _bare(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, function: Command, help_text: str
) -> argparse.ArgumentParser:
    """A command that does not read the system's configuration."""
    parser = commands.add_parser(name, help=help_text, description=help_text[0].upper() + help_text[1:] + ".")
    parser.set_defaults(command=function)
    return parser


def _add_resolved(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--resolved", type=Path, metavar="JSON", help="resolved configuration, as the launcher writes it")


def _add_draft(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    draft = commands.add_parser("draft", help="drafts: init, import, pretrain, list, show, activate, rollback, export")
    verbs = draft.add_subparsers(metavar="COMMAND", required=True)
    _add_resolved(_command(verbs, "init", _draft_init, "make a draft: random, or from draft.checkpoint"))
    imported = _command(verbs, "import", _draft_import,
                        "make a draft of a published EAGLE-3 checkpoint (SafeAILab's layout or speculators')")  # fmt: skip
    imported.add_argument("path", type=Path, metavar="PATH", help="its directory: config.json and safetensors files")
    pretrain = _command(verbs, "pretrain", _draft_pretrain,
                        "start the system, train its draft on the answers to a file's prompts, and stop")  # fmt: skip
    pretrain.add_argument("--traffic", required=True, metavar="FILE",
                          help="JSON lines with OpenAI messages, or the name of a source: human_eval, sharegpt, reasoning_gym")  # fmt: skip
    pretrain.add_argument("--tokens", type=int, default=1_000_000, metavar="N",
                          help="token visits of the learner after which it ends (default 1000000); a plateau ends it sooner")  # fmt: skip
    pretrain.add_argument("--concurrency", type=int, default=8, help="requests in flight (default 8)")
    _command(verbs, "list", _draft_list, "list drafts")
    show = _command(verbs, "show", _draft_show, "verify a draft and print its manifest")
    activate = _command(verbs, "activate", _draft_activate, "swap a draft into the running engines",
                        force="skip the gate's verdict; integrity checks always hold")  # fmt: skip
    activate.add_argument(
        "--expected-active", type=int, metavar="N", help="refuse if another draft is active (default: as on disk)"
    )
    _command(verbs, "rollback", _draft_rollback, "go back to the previous draft")
    export = _command(verbs, "export", _draft_export, "write a stand-alone EAGLE-3 checkpoint")
    for parser in (show, activate, export):
        parser.add_argument("version", type=int)
    export.add_argument("out_dir", type=Path)


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    bench = commands.add_parser("bench", help="measure: run, report, compare, reference, bars, drill")
    verbs = bench.add_subparsers(metavar="COMMAND", required=True)
    _add_bench_run(verbs)
    _add_bench_report(verbs)
    _command(
        verbs, "reference", _bench_reference, "serve the same engine without speculation and without our parts, to compare with"
    )
    bars = _command(verbs, "bars", _bench_bars, "measure afresh what the project promises and compare with its bars",
                    json="print JSON", list="print the bars and measure nothing")  # fmt: skip
    bars.add_argument("--only", action="append", metavar="NAME", help="a part (P1) or one bar (P1.al_heldout); may be repeated")
    _command(verbs, "drill", _bench_drill, "kill -9 every process twice under load and count what clients notice",
             json="print JSON")  # fmt: skip


def _add_bench_run(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    help_text = "send a scenario's traffic to an OpenAI-compatible server and keep what came back"
    run = _bare(verbs, "run", _bench_run, help_text)
    run.add_argument("scenario", type=Path, metavar="SCENARIO", help="a TOML file, or the name of a shipped scenario")
    run.add_argument("--url", help="the server (default: the system that runs from the state directory)")
    run.add_argument("--admin-url", help="its admin API, where it is no local system; needs PACELINE_OPERATOR_TOKEN")
    run.add_argument("--model", help="model name (default: the first the server lists)")
    run.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: runs/NAME-TIME)")
    run.add_argument("--state", type=Path, metavar="DIR", help="state directory of the local system (default: `paceline up`'s)")
    run.add_argument(
        "--set", action="append", default=[], metavar="A.B=VALUE", dest="scenario_overrides", help="override the scenario"
    )


def _add_bench_report(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    help_text = "measure what a run left: report.json, report.html, figures, and what happened in words"
    report = _bare(verbs, "report", _bench_report, help_text)
    report.add_argument("directory", type=Path, metavar="DIR", help="of a run")
    report.add_argument(
        "--baseline",
        type=Path,
        metavar="REPORT",
        help="report.json, or its directory, to compare with; exit with 1 if this run is worse",
    )

    help_text = "compare run B with run A, prompt by prompt where both answered the same ones"
    compare = _bare(verbs, "compare", _bench_compare, help_text)
    compare.add_argument("before", type=Path, metavar="A", help="directory of a run")
    compare.add_argument("after", type=Path, metavar="B", help="directory of a run")
    compare.add_argument("--json", action="store_true", help="print JSON")
    compare.add_argument("--fail-on-regression", action="store_true", help="exit with 1 if any measure of B is worse")
    compare.add_argument("--lossless", action="store_true", help="exit with 1 unless B's greedy texts equal those of A")


def _config(options: argparse.Namespace) -> SystemConfig:
    from launch.config import SystemConfig

    resolved: Path | None = getattr(options, "resolved", None)
    if resolved is not None:
        return SystemConfig.read_json(resolved)
    return SystemConfig.load(options.config, options.overrides)


def _forwarded(options: argparse.Namespace) -> list[str]:
    """The configuration options of this command line, for another command."""
    files = ["--config", *(str(path.absolute()) for path in options.config)] if options.config else []
    return files + [word for text in options.overrides for word in ("--set", text)]


def _say(text: str) -> None:
    print(text, flush=True)


def _up(options: argparse.Namespace) -> int:
    from launch import up

    config = _config(options)
    if options.detach:
        from launch.detached import start_and_wait

        start_and_wait(config, _forwarded(options), _say)
        return 0
    return up.up(config, _say)


def _down(options: argparse.Namespace) -> int:
    from launch.up import down

    config = _config(options)
    return down(config.state.directory, config.launch.grace_s, _say)


def _demo(options: argparse.Namespace) -> int:
    from launch.demo import demo

    return demo(_config(options), _forwarded(options), minutes=options.minutes, concurrency=options.concurrency)


def _serve(options: argparse.Namespace) -> int:
    from launch.roles import run_gateway

    return run_gateway(options.resolved or _role_file(options, "gateway"))


def _learn(options: argparse.Namespace) -> int:
    from launch.roles import run_learner

    return run_learner(options.resolved or _role_file(options, "learner"))


def _role_file(options: argparse.Namespace, role: str) -> Path:
    """The role's resolved configuration as the last `up` of this state directory wrote it."""
    from launch.rundir import RunDir

    return RunDir(_config(options).state.directory).role_file(role)


def _model_fetch(options: argparse.Namespace) -> int:
    from launch import models
    from launch.progress import bar

    path = options.name or _config(options).target.path
    with bar(f"fetching {path}") as report:
        directory = models.resolve(path, report)
    _say(str(directory))
    return 0


def _plan(options: argparse.Namespace) -> int:
    from launch import host, models
    from launch.plan import make_plan
    from launch.plan_text import plan_as_json, plan_as_text
    from launch.rundir import make_tokens

    config = _config(options)
    target_dir = models.expected_directory(config.target.path) or Path(config.target.path)
    plan = make_plan(host.with_ports(config), host.gather(), make_tokens(os.environ), target_dir=target_dir)
    _say(plan_as_json(plan) if options.json else plan_as_text(plan))
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from launch.doctor import doctor

    return doctor(_config(options), as_json=options.json)


def _view(options: argparse.Namespace) -> int:
    from launch.view import watch

    return watch(_config(options).state.directory)


def _bench_run(options: argparse.Namespace) -> int:
    from launch.config import SystemConfig
    from launch.provenance import git_revision, versions
    from loadtest.run.command import run

    return run(
        options.scenario,
        options.scenario_overrides,
        url=options.url,
        admin_url=options.admin_url,
        model=options.model,
        state_dir=options.state or SystemConfig.load([], []).state.directory,
        out_dir=options.out,
        commit=git_revision(),
        versions=versions(),
    )


def _bench_report(options: argparse.Namespace) -> int:
    from loadtest.report.command import report

    return report(options.directory, options.baseline, _say)


def _bench_compare(options: argparse.Namespace) -> int:
    from loadtest.report.compare import compare

    return compare(
        options.before,
        options.after,
        _say,
        as_json=options.json,
        fail_on_regression=options.fail_on_regression,
        lossless=options.lossless,
    )


def _bench_reference(options: argparse.Namespace) -> int:
    from loadtest.reference import serve

    return serve(_forwarded(options), _say)


def _bench_bars(options: argparse.Namespace) -> int:
    from loadtest.bars.command import bars

    return bars(only=options.only or [], as_json=options.json, list_only=options.list, up_arguments=_forwarded(options))


def _bench_drill(options: argparse.Namespace) -> int:
    from loadtest.bars.command import DRILL, bars

    return bars(only=DRILL, as_json=options.json, list_only=False, up_arguments=_forwarded(options))


def _draft_init(options: argparse.Namespace) -> int:
    from launch import drafts

    _say(f"draft {drafts.init(_config(options))}")
    return 0


def _draft_import(options: argparse.Namespace) -> int:
    from launch import drafts
    from wire.store import DraftStore

    config = _config(options)
    version = drafts.import_checkpoint(config, options.path)
    _say(f"draft {version} from {options.path}: {drafts.how_to_serve(DraftStore(config.state.directory), version)}")
    return 0


def _draft_pretrain(options: argparse.Namespace) -> int:
    from launch.pretrain import pretrain

    return pretrain(
        _config(options),
        _forwarded(options),
        options.traffic,
        num_tokens=options.tokens,
        concurrency=options.concurrency,
        say=_say,
    )


def _draft_list(options: argparse.Namespace) -> int:
    from launch import drafts
    from wire.store import DraftStore

    lines = drafts.listing(DraftStore(_config(options).state.directory))
    _say("\n".join(lines) if lines else "no drafts yet; `paceline draft init` makes one")
    return 0


def _draft_show(options: argparse.Namespace) -> int:
    from launch import drafts
    from wire.store import DraftStore

    _say(drafts.show(DraftStore(_config(options).state.directory), options.version))
    return 0


def _draft_activate(options: argparse.Namespace) -> int:
    from launch import drafts

    state_dir = _config(options).state.directory
    _say(drafts.activate(state_dir, options.version, expected_active=options.expected_active, force=options.force))
    return 0


def _draft_rollback(options: argparse.Namespace) -> int:
    from launch import drafts

    _say(drafts.rollback(_config(options).state.directory))
    return 0


def _draft_export(options: argparse.Namespace) -> int:
    from launch import drafts
    from wire.store import DraftStore

    drafts.export(DraftStore(_config(options).state.directory), options.version, options.out_dir)
    _say(str(options.out_dir))
    return 0


def _version(_options: argparse.Namespace) -> int:
    from launch.provenance import git_revision, versions

    for name, version in versions().items():
        _say(f"{name} {version}")
    revision = git_revision()
    if revision:
        _say(f"git {revision}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
