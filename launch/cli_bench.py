"""`paceline bench`: parses and dispatches its commands; what they need is imported by the one that needs it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from launch.arguments import bare, command, forwarded, say

if TYPE_CHECKING:
    from loadtest.bars.registry import Bench
    from loadtest.run.conduct import Provenance


def add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    bench = commands.add_parser("bench", help="measure: run, report, compare, learning, reference, bars, drill")
    verbs = bench.add_subparsers(metavar="COMMAND", required=True)
    _add_bench_run(verbs)
    _add_bench_report(verbs)
    learning = command(verbs, "learning", _bench_learning,
                       "compare drafts that learn with others and with none: the same requests for each, one after the other")  # fmt: skip
    learning.add_argument("benchmark", nargs="?", type=Path, default=Path("learning"), metavar="BENCHMARK",
                          help="a TOML file, or the name of a shipped one (default: learning)")  # fmt: skip
    learning.add_argument("--arms", nargs="+", default=[], metavar="NAME", help="only these (default: all that are not done)")
    learning.add_argument(
        "--out", type=Path, metavar="DIR", help="where to write and what to go on from (default: runs/BENCHMARK)"
    )
    command(
        verbs, "reference", _bench_reference, "serve the same engine without speculation and without our parts, to compare with"
    )
    bars = command(verbs, "bars", _bench_bars, "measure afresh what the project promises and compare with its bars",
                    json="print JSON", list="print the bars and measure nothing")  # fmt: skip
    bars.add_argument("--only", action="append", metavar="NAME", help="a part (P1) or one bar (P1.al_heldout); may be repeated")
    command(verbs, "drill", _bench_drill, "kill -9 every process twice under load and count what clients notice",
             json="print JSON")  # fmt: skip


def _add_bench_run(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    help_text = "send a scenario's traffic to an OpenAI-compatible server and keep what came back"
    run = bare(verbs, "run", _bench_run, help_text)
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
    report = bare(verbs, "report", _bench_report, help_text)
    report.add_argument("directory", type=Path, metavar="DIR", help="of a run")
    report.add_argument(
        "--baseline",
        type=Path,
        metavar="REPORT",
        help="report.json, or its directory, to compare with; exit with 1 if this run is worse",
    )

    help_text = "compare run B with run A, prompt by prompt where both answered the same ones"
    compare = bare(verbs, "compare", _bench_compare, help_text)
    compare.add_argument("before", type=Path, metavar="A", help="directory of a run")
    compare.add_argument("after", type=Path, metavar="B", help="directory of a run")
    compare.add_argument("--json", action="store_true", help="print JSON")
    compare.add_argument("--fail-on-regression", action="store_true", help="exit with 1 if any measure of B is worse")
    compare.add_argument("--lossless", action="store_true", help="exit with 1 unless B's greedy texts equal those of A")


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

    return report(options.directory, options.baseline, say)


def _bench_compare(options: argparse.Namespace) -> int:
    from loadtest.report.compare import compare

    return compare(
        options.before,
        options.after,
        say,
        as_json=options.json,
        fail_on_regression=options.fail_on_regression,
        lossless=options.lossless,
    )


def _bench_learning(options: argparse.Namespace) -> int:
    from loadtest.learning.command import learning

    return learning(
        options.benchmark,
        arms=options.arms,
        out_dir=options.out,
        up_arguments=forwarded(options),
        provenance=_provenance(),
        say=say,
    )


def _bench_reference(options: argparse.Namespace) -> int:
    from loadtest.reference import serve

    return serve(forwarded(options), say)


def _bench_bars(options: argparse.Namespace) -> int:
    from loadtest.bars.command import bars

    return bars(only=options.only or [], as_json=options.json, list_only=options.list, bench=_bench_of(options))


def _bench_drill(options: argparse.Namespace) -> int:
    from loadtest.bars.command import DRILL, bars

    return bars(only=DRILL, as_json=options.json, list_only=False, bench=_bench_of(options))


def _bench_of(options: argparse.Namespace) -> Bench:
    from loadtest.bars.registry import Bench

    return Bench(tuple(forwarded(options)), _provenance())


def _provenance() -> Provenance:
    from launch.provenance import git_revision, versions
    from loadtest.run.conduct import Provenance

    return Provenance(git_revision(), versions(), {})
