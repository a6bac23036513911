"""Faults that no request may notice: a killed learner and bad drafts."""

from __future__ import annotations

import asyncio
import os
import signal
import time

from loadtest.bars import spoiled
from loadtest.bars.load import background_load, progress
from loadtest.bars.registry import Bench, Measured
from loadtest.processes import SystemUnderTestError
from loadtest.sources import human_eval
from loadtest.system import Answer, System, running_system

CONCURRENCY = 4
TRAIN_AT_MOST_S = 300.0
CHECKPOINT_EVERY_S = 10.0
RESUME_AT_MOST_S = 180.0

BAD_VERSIONS = (
    "..%2F0",
    "%2e%2e%2f0",
    "..",
    "0%2F..%2F0",
    "-1",
    "1e3",
    "0x1",
    "01",
    "%D9%A1",
    "0;rm",
    "active",
    "999999",
    "%00",
)
"""Sent where a version belongs, percent-encoded as they go over the wire."""


async def learner_kill(bench: Bench) -> dict[str, Measured]:
    """SIGKILL the learner after a checkpoint, under load; count failed requests; insist that training resumes."""
    settings = [f"learner.checkpoint_every_s={CHECKPOINT_EVERY_S}"]
    async with (
        running_system(bench.up_arguments, settings) as system,
        background_load(system, human_eval.load().train, concurrency=CONCURRENCY) as load,
    ):
        first = await system.learner_report(lambda report: report.num_steps > 0, within_s=TRAIN_AT_MOST_S)
        # Time for a checkpoint that holds at least those steps.
        await asyncio.sleep(2 * CHECKPOINT_EVERY_S)
        before = await system.learner_report(lambda report: report.num_steps > first.num_steps, within_s=TRAIN_AT_MOST_S)
        pid = system.process_id("learner")
        if pid is None:
            raise SystemUnderTestError("the learner is not running")
        os.kill(pid, signal.SIGKILL)
        killed_at_s, killed_at_unix_s = time.monotonic(), time.time()
        progress(f"learner (pid {pid}) killed at step {before.num_steps}")
        try:
            after = await system.learner_report(
                lambda report: report.sent_at_s > killed_at_unix_s + 1.0 and report.num_steps > 0,
                within_s=RESUME_AT_MOST_S,
            )
            resumed_after_s = time.monotonic() - killed_at_s
            later = await system.learner_report(lambda report: report.num_steps > after.num_steps, within_s=RESUME_AT_MOST_S)
        except SystemUnderTestError as error:
            return {"learner_kill_failed": Measured(None, {"reason": str(error), "failed": len(load.failed)})}
    detail = {
        "requests": len(load.results),
        "reasons": load.reasons(),
        "steps_before": before.num_steps,
        "steps_first_seen_after": after.num_steps,
        "steps_later": later.num_steps,
        "back_after_s": round(resumed_after_s, 1),
    }
    if after.num_steps < first.num_steps:
        return {"learner_kill_failed": Measured(None, {"reason": "training began anew instead of resuming", **detail})}
    return {"learner_kill_failed": Measured(len(load.failed), detail)}


async def bad_drafts(bench: Bench) -> dict[str, Measured]:
    """Offer every kind of bad draft and version while requests run."""
    verdicts: dict[str, str] = {}
    async with running_system(bench.up_arguments, ["learner.enabled=false"]) as system:
        active = (await system.status()).active_version
        if active is None:
            raise SystemUnderTestError("no draft is active")
        made = spoiled.make_all(system.state_dir / "drafts", good=active)
        async with background_load(system, human_eval.load().train, concurrency=CONCURRENCY) as load:
            await asyncio.sleep(2.0)
            for name, version in made.items():
                verdicts[name] = await offer(system, str(version), active)
            for text in BAD_VERSIONS:
                verdicts[f"version {text}"] = await offer(system, text, active)
            verdicts["stale expected_active"] = await offer(system, str(active), active, expected_active=active + 1)
            await asyncio.sleep(2.0)
        still = (await system.status()).active_version
    refused = [name for name, verdict in verdicts.items() if verdict.startswith("refused")]
    share = 100 * len(refused) / len(verdicts)
    detail = {
        "offered": len(verdicts),
        "not_refused": {name: verdict for name, verdict in verdicts.items() if name not in refused},
        "verdicts": verdicts,
        "requests": len(load.results),
        "failed_requests": len(load.failed),
    }
    if load.failed or still != active or not load.results:
        return {"bad_drafts_refused": Measured(None, {"reason": "serving was disturbed", "active_now": still, **detail})}
    return {"bad_drafts_refused": Measured(share, detail)}


async def offer(system: System, version: str, active: int, *, expected_active: int | None = None) -> str:
    """Try to activate something bad; `refused ...` only where a reason was given and the old draft serves on."""
    body = {"expected_active": active if expected_active is None else expected_active, "force": True}
    answer: Answer = await system.admin("POST", f"/admin/drafts/{version}/activate", body)
    now = (await system.status()).active_version
    if now != active:
        return f"NOT refused: version {now} is active now"
    if not 400 <= answer.status < 500:
        return f"answered {answer.status}: {answer.reason}"
    return (
        f"refused ({answer.status}): {answer.reason[:160]}" if answer.reason else f"answered {answer.status} without a reason"
    )
