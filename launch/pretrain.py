"""`paceline draft pretrain`: an ordinary system, the prompts of a file, and an end. A warm start before there is any traffic.

Nothing is trained here. The learner of the system that is started does that, on what its engines answer, with its gate, its
publisher and its checkpoint; this module has the prompts sent, tells how far it is, and says when it is enough.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from launch.config import SystemConfig
from launch.detached import start_and_wait
from launch.drafts import admin_client
from launch.pretrain_sending import Record, Sender
from launch.progress import bar
from launch.rundir import LaunchError, RunDir
from launch.up import down
from launch.view import read_status
from learner.config import LearnerSettings
from wire.control import AdminStatus, LearnerReport
from wire.store import DraftStore

if TYPE_CHECKING:
    from loadtest.traffic import Prompt

PLATEAU_SHARE = 0.25
"""So much of the budget without a better draft is a plateau."""
_FORCED = ("capture.enabled=true", "capture.rate=1", "learner.enabled=true")
_MARGIN_S = 10.0
_POLL_S = 1.0
_PLAIN_POLL_S = 15.0

Say = Callable[[str], None]


def pretrain(config: SystemConfig, arguments: list[str], traffic: str, *, num_tokens: int, concurrency: int, say: Say) -> int:
    """Start a system, train on the answers to a source's prompts, stop it, and make the best draft active and the floor.

    `arguments` are the command line's configuration options, `traffic` is a file of JSON lines with OpenAI messages or the name
    of a source. Only its training part is sent: the held-out fifth stays unseen for measurements. Returns the exit status: 0,
    1 where no draft passed the gate, 130 where it was interrupted; the same command then goes on. Raises PacelineError.
    """
    if num_tokens < 1 or concurrency < 1:
        raise LaunchError(f"--tokens {num_tokens} and --concurrency {concurrency} must be 1 or more")
    prompts = _prompts(traffic)
    state_dir = config.state.directory
    record = Record(state_dir / "pretrain", prompts)
    say(f"{len(prompts)} prompts of {traffic}, {len(prompts) - len(record.remaining)} of them answered before")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the system must not outlive this command
    forced = [word for text in _FORCED for word in ("--set", text)]
    system = start_and_wait(config, [*arguments, *forced], say)
    try:
        sender = Sender(str(system["gateway_url"]), Path(system["target_dir"]).name, record, concurrency)
        course = Course(record, num_tokens, config.learner)
        with bar("pretraining") as report:
            learn(RunDir(state_dir), sender, course, report)
    except KeyboardInterrupt:
        say("interrupted; the same command goes on from here")
        return 130
    finally:
        down(state_dir, config.launch.grace_s, say)
    return conclude(DraftStore(state_dir), course.reason, say)


def _prompts(traffic: str) -> list[Prompt]:
    from loadtest import sources

    source = sources.load(traffic)
    if source.num_broken:
        print(f"{traffic}: {source.num_broken} records hold no prompt and are left out", flush=True)
    return list({prompt.id: prompt for prompt in sources.open_part(traffic, source, "train")}.values())


class Course:
    """Decides when enough was learned. It only reads what the learner reports."""

    def __init__(self, record: Record, num_tokens: int, learner: LearnerSettings) -> None:
        self._record, self._num_tokens = record, num_tokens
        self._replay, self._gate_every_s = learner.replay, learner.gate.every_s
        self.num_spent = 0
        """Token visits, those of interrupted runs included."""
        self.reason = ""
        """Why it is over; empty while it goes on."""
        self._is_idle = True
        self._spent_at_start: int | None = None
        self._num_accepted = 0
        self._spent_at_accepted: int | None = None
        self._waiting_since_s: float | None = None
        self._judged_then = 0
        self._deadline_s = 0.0

    def note(self, report: LearnerReport, *, num_left: int, now_s: float) -> bool:
        """Take in a report; True when all is done, the gate's word on the last weights included."""
        self.num_spent = max(report.num_tokens_seen - self._record.begin(report.num_tokens_seen), 0)
        if self._spent_at_start is None:
            self._spent_at_start = self.num_spent
        num_judged = sum(report.num_gate_decisions.values())
        self._note_gate(report.num_gate_decisions.get("accepted", 0))
        self._is_idle = report.state == "waiting"
        is_last = num_left == 0 and self._is_idle
        self._waiting_since_s = (self._waiting_since_s or now_s) if is_last else None
        if not self.reason:
            self.reason = self._why_over()
            self._judged_then, self._deadline_s = num_judged, now_s + 2 * self._gate_every_s + _MARGIN_S
        is_used_up = self._is_used_up(now_s)
        if is_used_up and not self.reason:
            self.reason = "every answer has had its passes"
        return bool(self.reason) and (is_used_up or num_judged > self._judged_then or now_s > self._deadline_s)

    def _note_gate(self, num_accepted: int) -> None:
        if self._spent_at_accepted is None or num_accepted > self._num_accepted:
            self._spent_at_accepted = self.num_spent
        self._num_accepted = num_accepted

    def _why_over(self) -> str:
        if self.num_spent >= self._num_tokens:
            return f"the budget of {self._num_tokens} token visits is used up"
        if self.num_spent - (self._spent_at_accepted or 0) >= PLATEAU_SHARE * self._num_tokens:
            return f"no better draft in the last {PLATEAU_SHARE * self._num_tokens:.0f} token visits"
        return ""

    def _is_used_up(self, now_s: float) -> bool:
        """For so long that the gate has judged the last step too, if it could."""
        return self._waiting_since_s is not None and now_s - self._waiting_since_s > self._gate_every_s + _MARGIN_S

    def is_behind(self, num_answer_tokens: int) -> bool:
        """Whether the learner still has a whole recent window to go over, of what was answered since this run began: an answer
        that comes now would push out one that has not had its passes. An idle one never is: what is held out or lost gets no visits."""
        num_visits = self.num_spent - (self._spent_at_start or 0)
        return not self._is_idle and self._replay.max_passes * (num_answer_tokens - self._replay.recent_tokens) > num_visits

    @property
    def share(self) -> float:
        return min(self.num_spent / self._num_tokens, 1.0)


def learn(run_dir: RunDir, sender: Sender, course: Course, report: Callable[[str, float], None]) -> None:
    """Send and watch until the course is over; raises LaunchError where the system is gone."""
    client = admin_client(run_dir.state)
    poll_s = _POLL_S if Console().is_terminal else _PLAIN_POLL_S
    reported_at_s = 0.0
    sender.start()
    try:
        while True:
            if sender.failure:
                raise LaunchError(sender.failure)
            now_s = time.monotonic()
            try:
                status = read_status(client)
            except LaunchError:
                if not run_dir.is_locked():
                    raise
                status = None  # the gateway is being started again
            if status and status.learner.report:
                is_over = course.note(status.learner.report, num_left=sender.num_left, now_s=now_s)
                sender.is_waiting = course.is_behind(sender.num_answer_tokens)
                if course.reason:
                    sender.send_no_more()
                if is_over or now_s - reported_at_s >= poll_s:
                    reported_at_s = now_s
                    report(how_far(status, sender, course), course.share)
                if is_over:
                    return
            time.sleep(_POLL_S)
    finally:
        sender.stop()


def how_far(status: AdminStatus, sender: Sender, course: Course) -> str:
    """A line for the person who waits."""
    report, acceptance = status.learner.report, status.acceptance
    failed = f" ({sender.num_failed} given up)" if sender.num_failed else ""
    live = f"AL {acceptance.acceptance_length:.2f}" if acceptance else "AL -"
    learner = f"{report.state}, {report.tokens_per_s:.0f} visits/s" if report else "no learner"
    last = f"; {course.reason}, the last weights are judged" if course.reason else ""
    return (
        f"{sender.num_left} prompts left{failed}, {course.num_spent} token visits, draft {status.active_version} {live}, "
        f"learner {learner}{last}"
    )


def conclude(store: DraftStore, reason: str, say: Say) -> int:
    """Make what was learned the floor too, and tell; 1 where nothing was."""
    active = store.active()
    manifest = None if active is None else store.manifest(active)
    if active is None or manifest is None or manifest.gate is None:
        say(f"{reason}; no draft passed the gate, draft {active} stays: give it more prompts, or a larger --tokens")
        return 1
    store.set_floor(active)
    gate = manifest.gate
    say(
        f"{reason}; draft {active} is active and the floor: simulated AL {gate.candidate_al:.2f}, "
        f"that of draft {manifest.parent} on the same requests {gate.incumbent_al:.2f}. `paceline up` starts from it"
    )
    return 0
