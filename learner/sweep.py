"""An offline sweep over training settings: `python -m learner.sweep SWEEP.toml --requests DIR [--out RESULTS.jsonl] [--set KEY=VALUE]`.

Captured requests (a learner's `requests` directory, which stays as it is) arrive again in their order. Each setting trains a
draft of its own on them, and every so many token visits it is judged on the same prompts, which none trains on. `Sweep` and
`Setting` say what the file holds; `learner/sweeps/` has some.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import Struct
from pydantic import Field

from drafter.batch import NoAnchor
from drafter.create import checkpoint_draft, random_draft
from drafter.draft import Draft
from drafter.head import Head
from drafter.target import TargetParts, load_target_parts
from drafter.vocabulary import better_vocabulary, control_token_ids
from learner.archive import RequestArchive
from learner.config import DeviceChoice, ReplaySettings, TrainSettings
from learner.device import choose_device
from learner.evaluate import Evaluator, Score, simulated_al
from learner.gate import paired_gain
from learner.ranks import OneRank
from learner.replay import Replay
from learner.request import CapturedRequest, is_held_out
from learner.schedule import rate_share
from learner.trainer import Diverged, Trainer
from wire.config import Config, load_tables, merge
from wire.errors import ConfigError, PacelineError
from wire.spec import CaptureSpec, resolve_capture_spec

_CONFIDENCE, _NUM_RESAMPLES = 0.95, 2000


class Setting(Config):
    """`[[setting]]`: what one draft is trained with. `train` and `replay` lie over the tables of the same name at the top."""

    name: str
    visits_per_token: float = Field(3.5, gt=0.0)
    """Token visits there is time for while one completion token arrives; `replay.max_passes` bounds them too."""
    start: Path | None = None
    """Directory of the EAGLE-3 checkpoint to start from; a random draft where absent."""
    train: TrainSettings = TrainSettings()
    replay: ReplaySettings = ReplaySettings()


class Sweep(Config):
    """A sweep's file, its `[[setting]]` tables in `settings`. All of them share what stands at the top."""

    target: Path
    """Directory of the target that the requests were captured from."""
    dtype: str = "bfloat16"
    """Of the captured rows."""
    draft_vocab_size: int = Field(8192, ge=1)
    aux_layer_ids: tuple[int, ...] | None = None
    device: DeviceChoice = "auto"
    """As `learner.device`."""
    num_speculative_tokens: int = Field(3, ge=1)
    """K of the simulated AL."""
    token_visits: int = Field(ge=1)
    """Training of each setting."""
    judge_every: int = Field(10_000, ge=1)
    """Token visits between two judgements."""
    max_judged_requests: int = Field(32, ge=1)
    """Held-out requests that are scored, evenly spread over the archive."""
    settings: tuple[Setting, ...] = Field(min_length=1)


class Point(Struct, frozen=True, kw_only=True):
    """One judgement of one setting."""

    setting: str
    num_steps: int
    num_tokens_seen: int
    """Token visits, repeats counted."""
    num_tokens_distinct: int
    simulated_al: float
    kl: float | None
    """Running mean in training, nats."""
    train_s: float
    """Processor seconds of the training so far."""


def read_sweep(path: Path, overrides: Sequence[str] = ()) -> Sweep:
    """Raises ConfigError for what is wrong with the file, and for settings that could not be compared."""
    tables = load_tables([path], overrides)
    common: dict[str, Any] = {name: tables.pop(name) for name in ("train", "replay") if name in tables}
    tables["settings"] = [merge(common, setting) for setting in tables.pop("setting", [])]
    sweep = Sweep.build(tables, source=str(path))
    names = [setting.name for setting in sweep.settings]
    if len(set(names)) != len(names):
        raise ConfigError(f"{path}: two settings have the same name, in {', '.join(names)}; give each its own")
    shares = {setting.replay.holdout_share for setting in sweep.settings}
    if len(shares) != 1:
        raise ConfigError(
            f"{path}: replay.holdout_share is {sorted(shares)}; all settings are judged on the same prompts: give one"
        )
    return sweep


class Course:
    """What all settings have in common: the target, the requests in order of arrival, and the judge."""

    def __init__(self, sweep: Sweep, requests: Sequence[CapturedRequest], spec: CaptureSpec) -> None:
        share = sweep.settings[0].replay.holdout_share
        ordered = sorted(requests, key=lambda request: request.captured_at_s)
        held_out = [request for request in ordered if is_held_out(request.prompt_key, share)]
        self.sweep, self.spec = sweep, spec
        self.arrivals = [request for request in ordered if not is_held_out(request.prompt_key, share)]
        num_judged = min(len(held_out), sweep.max_judged_requests)
        self.judged = [held_out[number * len(held_out) // num_judged] for number in range(num_judged)]
        if not (self.arrivals and self.judged):
            raise ConfigError(
                f"{len(requests)} usable requests leave {len(self.arrivals)} to train on and {len(self.judged)} to judge by; "
                "capture more, or change replay.holdout_share"
            )
        self.target: TargetParts = load_target_parts(sweep.target)
        self.control_ids = control_token_ids(sweep.target)
        self.device = choose_device(sweep.device, num_gpus=torch.cuda.device_count())
        self._evaluator = Evaluator(
            self.target,
            sweep.num_speculative_tokens,
            dtype=torch.bfloat16 if spec.dtype == "bfloat16" else torch.float32,
            max_context_rows=TrainSettings().max_context_rows,
            device=self.device,
        )

    def draft(self, setting: Setting) -> Draft:
        if setting.start is None:
            return random_draft(self.spec, self.sweep.target, self.target, setting.train.seed)
        return checkpoint_draft(self.spec, self.sweep.target, self.target, setting.start)[0]

    def scores(self, draft: Draft) -> dict[str, Score]:
        return self._evaluator.scores(draft, self.judged)


class Run:
    """One setting's way through the course."""

    def __init__(self, setting: Setting, course: Course) -> None:
        self._setting, self._course = setting, course
        self._trainer = Trainer(course.draft(setting), course.target, setting.train, OneRank(course.device))
        self._replay = Replay(setting.replay, course.spec.vocab_size, setting.train.seed)
        self._train_s = 0.0
        self.scores: dict[str, Score] = {}
        """Of the last judgement."""

    def points(self) -> Iterator[Point]:
        """A judgement at the start, after every `judge_every` visits, and at the end. Raises Diverged."""
        sweep, trainer = self._course.sweep, self._trainer
        yield self._judge()
        judge_at = sweep.judge_every
        for _ in self._steps():
            if trainer.num_tokens_seen >= judge_at and trainer.num_tokens_seen < sweep.token_visits:
                judge_at += sweep.judge_every
                yield self._judge()
        yield self._judge()

    def _steps(self) -> Iterator[None]:
        """Yields after each step. Requests arrive as fast as training goes on; after the last one only the passes are bounded."""
        limit = self._course.sweep.token_visits
        for request in self._course.arrivals:
            if self._trainer.num_tokens_seen >= limit:
                return
            self._trainer.forget(self._replay.add(request))
            self._trainer.forget(self._replay.note_counted())  # no gate waits for it here
            yield from self._steps_until(min(self._setting.visits_per_token * self._replay.num_tokens_distinct, limit))
        yield from self._steps_until(limit)

    def _steps_until(self, num_visits: float) -> Iterator[None]:
        train, replay = self._setting.train, self._replay
        while self._trainer.num_tokens_seen < num_visits and (batch := replay.draw(train.batch_tokens)):
            started_s = time.process_time()
            try:
                self._trainer.step(batch, rate_share(replay.num_tokens, train.settling_tokens))
            except NoAnchor:
                continue
            self._train_s += time.process_time() - started_s
            yield

    def _judge(self) -> Point:
        self._refresh_vocabulary()
        self.scores = self._course.scores(self._trainer.candidate())
        return Point(
            setting=self._setting.name,
            num_steps=self._trainer.num_steps,
            num_tokens_seen=self._trainer.num_tokens_seen,
            num_tokens_distinct=self._replay.num_tokens_distinct,
            simulated_al=simulated_al(self.scores.values()),
            kl=self._trainer.mean_kl,
            train_s=self._train_s,
        )

    def _refresh_vocabulary(self) -> None:
        """As a learner does before each gate."""
        head, course = self._trainer.head, self._course
        gain = self._setting.train.min_coverage_gain
        chosen = better_vocabulary(
            self._replay.counts_V,
            course.control_ids,
            head.vocabulary,
            gain,
            [tokens.counts_V for tokens in self._replay.domain_tokens().values()],
        )
        if head.is_target_rows and chosen is not None:
            self._trainer.set_head(Head.of_target(chosen, course.target.head_VD))


def run_sweep(course: Course, out: Path | None) -> None:
    """Run all settings one after another, print each judgement and, at the end, what each gains on the first that finished."""
    finished: dict[str, dict[str, Score]] = {}
    print(f"{len(course.arrivals)} requests arrive, {len(course.judged)} are judged by")
    print(f"{'setting':<20}{'visits':>9}{'distinct':>9}{'AL':>7}{'KL':>8}{'train_s':>9}")
    for setting in course.sweep.settings:
        run = Run(setting, course)
        try:
            for point in run.points():
                _tell(point, out)
            finished[setting.name] = run.scores
        except Diverged as error:
            print(f"{setting.name:<20} diverged: {error}")
    first, *others = finished or [""]
    for name in others:
        gain = paired_gain(finished[name], finished[first], num_resamples=_NUM_RESAMPLES)
        low, high = gain.low(1 - _CONFIDENCE), gain.high(1 - _CONFIDENCE)
        print(f"{name} over {first} at the end: {gain.mean:+.3f} AL ({low:+.3f} to {high:+.3f})")


def _tell(point: Point, out: Path | None) -> None:
    kl = "-" if point.kl is None else f"{point.kl:.3f}"
    visits, distinct = point.num_tokens_seen, point.num_tokens_distinct
    print(f"{point.setting:<20}{visits:>9}{distinct:>9}{point.simulated_al:>7.3f}{kl:>8}{point.train_s:>9.1f}", flush=True)
    if out is not None:
        with out.open("ab") as opened:
            opened.write(msgspec.json.encode(point) + b"\n")


def main(arguments: Sequence[str]) -> int:
    """The exit status, with one line on stderr for an error of the user's."""
    parser: Any = argparse.ArgumentParser(prog="python -m learner.sweep", description=__doc__)
    parser.add_argument("sweep", type=Path, help="the sweep's TOML file")
    parser.add_argument("--requests", type=Path, required=True, help="directory of captured requests; only read")
    parser.add_argument("--out", type=Path, help="file that the judgements are added to, one JSON object a line")
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], help="key.path=value over the file's; repeatable"
    )
    given = parser.parse_args(arguments)
    try:
        sweep = read_sweep(given.sweep, given.overrides)
        spec = resolve_capture_spec(
            sweep.target, dtype=sweep.dtype, draft_vocab_size=sweep.draft_vocab_size, aux_layer_ids=sweep.aux_layer_ids
        )
        run_sweep(Course(sweep, list(RequestArchive(given.requests, spec).read_only()), spec), given.out)
    except PacelineError as error:
        print(f"sweep: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
