"""What commits do to the requests beside them: 100 in a row, alternating two drafts, under 8 greedy streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from loadtest.bars.load import Load, background_load, progress
from loadtest.bars.registry import Bench, Measured
from loadtest.closed_loop import run_batch
from loadtest.processes import SystemUnderTestError
from loadtest.sources import human_eval
from loadtest.statistics import CommitGaps, Interval, changed, commit_gaps
from loadtest.system import OUR_PARTS, SPECULATION, System, lone_engine, running_system
from loadtest.traffic import Prompt
from wire.control import SwapReport

NUM_COMMITS = 100
CONCURRENCY = 8
NUM_PROMPTS = 24
OPTIONS: dict[str, Any] = {"max_tokens": 192, "temperature": 0.0, "ignore_eos": True, "return_token_ids": True}
LEARN_AT_MOST_S = 8 * 60.0
BETWEEN_COMMITS_S = 0.5

# fp32: on a CPU, bf16 rounds one-row and many-row steps differently, so its outputs depend on who else is in the batch.
ENGINE_SETTINGS = ("target.dtype=float32",)
# The canary must not add commits of its own, nor the gate refuse to go back to the worse draft (activation is forced).
QUIET_CANARY = ("canary.min_verify_steps=1000000000", "canary.deadline_s=100000.0")

_SLACK_S = 0.05
"""Between the end of a commit in the engine and its answer here."""


async def exactness(bench: Bench) -> dict[str, Measured]:
    """In fp32: does any request fail, end early, or differ in a token from an engine without speculation."""
    run = await run_commits(bench, ENGINE_SETTINGS)
    progress("the same prompts on an engine without speculation")
    async with lone_engine(bench.up_arguments, ENGINE_SETTINGS, without=OUR_PARTS + SPECULATION) as url:
        answers = await run_batch(url, run.model, run.prompts, concurrency=CONCURRENCY, options=OPTIONS)
    broken = [answer.error for answer in answers if not answer.is_ok]
    if broken:
        raise SystemUnderTestError(f"the reference engine failed: {broken[0]}")
    return exactness_values(run, {answer.prompt_id: answer.token_ids for answer in answers})


def exactness_values(run: CommitRun, reference: dict[str, list[int]]) -> dict[str, Measured]:
    """`reference`: token ids by prompt from the engine without speculation."""
    differing = changed([result for result in run.load.results if result.is_ok], reference)
    compared = len(run.load.results) - len(run.load.failed)
    return {
        "commit_failures": Measured(len(run.load.failed), {**run.detail, "reasons": run.load.reasons()}),
        "commit_changed": Measured(len(differing), {"compared": compared, "prompts": differing[:5], **timing(run.gaps)}),
    }


async def stall(bench: Bench) -> dict[str, Measured]:
    """In the dtype that is served: how much longer a stream waits around a commit."""
    return stall_values(await run_commits(bench, ()))


def stall_values(run: CommitRun) -> dict[str, Measured]:
    """Nothing is measured where a request failed: its gaps would be missing."""
    if run.load.failed:
        return {name: Measured(None, {"reasons": run.load.reasons()}) for name in ("commit_gap_median_ms", "commit_gap_p99_ms")}
    extra_ms = [value * 1e3 for value in run.gaps.extra_s]
    detail = {**run.detail, **timing(run.gaps)}
    return {
        "commit_gap_median_ms": Measured(float(np.median(extra_ms)) if extra_ms else None, detail),
        "commit_gap_p99_ms": Measured(float(np.percentile(extra_ms, 99)) - run.gaps.step_s * 1e3 if extra_ms else None, detail),
    }


@dataclass(frozen=True)
class CommitRun:
    """100 commits under load, and what the streams saw."""

    model: str
    prompts: Sequence[Prompt]
    load: Load
    gaps: CommitGaps
    detail: dict[str, Any]


async def run_commits(bench: Bench, engine_settings: Sequence[str]) -> CommitRun:
    source = human_eval.load()
    prompts = source.train[:NUM_PROMPTS]
    async with running_system(bench.up_arguments, (*engine_settings, *QUIET_CANARY)) as system:
        note = await learn_a_second_draft(system, source.train)
        async with background_load(system, prompts, concurrency=CONCURRENCY, options=lambda _passes: OPTIONS) as load:
            commits, stalls_ms = await alternate(system)
        detail = {
            "commits": len(commits),
            "requests": len(load.results),
            "drafts": note,
            "apply_ms_median": _median(stalls_ms),
        }
        return CommitRun(system.model, prompts, load, commit_gaps(load.results, commits), detail)


def timing(gaps: CommitGaps) -> dict[str, Any]:
    """The numbers behind a gap, ms."""
    extra_ms = [value * 1e3 for value in gaps.extra_s]
    return {
        "extra_gap_ms_median": round(float(np.median(extra_ms)), 1) if extra_ms else None,
        "extra_gap_ms_p99": round(float(np.percentile(extra_ms, 99)), 1) if extra_ms else None,
        "control_gap_ms": round(gaps.control_s * 1e3, 1),
        "decode_step_ms": round(gaps.step_s * 1e3, 1),
        "commits_judged": len(gaps.extra_s),
        "commits_beside_a_prefill": gaps.num_beside_prefill,
        "commits_unobserved": gaps.num_unobserved,
    }


async def learn_a_second_draft(system: System, prompts: Sequence[Prompt]) -> str:
    """Let the learner publish one draft that accepts something, then pause it; returns what the two drafts are.

    Swaps between two random drafts would change nothing a stream could notice.
    """
    started_at_s = time.monotonic()
    async with background_load(system, prompts, concurrency=4):
        while time.monotonic() - started_at_s < LEARN_AT_MOST_S:
            status = await system.status()
            if status.active_version:
                break
            await asyncio.sleep(2.0)
        else:
            raise SystemUnderTestError(
                f"the learner published no draft in {LEARN_AT_MOST_S / 60:.0f} minutes to alternate with"
            )
    await system.must("POST", "/admin/learner/pause")
    progress(f"a first learned draft after {time.monotonic() - started_at_s:.0f} s")
    return "the random draft and the first learned one"


async def alternate(system: System) -> tuple[list[Interval], list[float]]:
    """Commit two drafts in turn; returns when each took place, and the time inside the worker, ms."""
    versions = [int(entry["version"]) for entry in (await system.must("GET", "/admin/drafts"))["drafts"]]
    pair = (versions[0], versions[-1])
    commits: list[Interval] = []
    stalls_ms: list[float] = []
    while len(commits) < NUM_COMMITS:
        await asyncio.sleep(BETWEEN_COMMITS_S)
        active = (await system.status()).active_version
        version = pair[0] if active != pair[0] else pair[1]
        answer = await system.must("POST", f"/admin/drafts/{version}/activate", {"expected_active": active, "force": True})
        ended_at_s = time.monotonic()
        report = msgspec.convert(answer, SwapReport)
        if report.outcome != "committed":
            raise SystemUnderTestError(f"commit {len(commits) + 1} of {version}: {report.outcome}: {report.reason}")
        apply_ms = max(commit.apply_ms for commit in report.commits.values())
        commits.append(Interval(ended_at_s - apply_ms / 1e3 - _SLACK_S, ended_at_s))
        stalls_ms.append(apply_ms)
        if len(commits) % 20 == 0:
            progress(f"{len(commits)} commits")
    return commits, stalls_ms


def _median(values: Sequence[float]) -> float | None:
    return round(float(np.median(values)), 1) if values else None
