"""LearningSession: the parts of a running learner, and the few decisions that need more than one of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from drafter.artifact import load_draft
from drafter.batch import NoAnchor
from drafter.draft import Draft
from drafter.target import TargetParts, load_target_parts
from drafter.vocabulary import control_token_ids
from learner.admin import AdminClient
from learner.archive import RequestArchive
from learner.assemble import Assembler
from learner.config import LearnerConfig, TrainSettings
from learner.coverage import CoverageMeter
from learner.evaluate import Evaluator
from learner.history import History
from learner.publisher import Publisher
from learner.rate import Rate
from learner.receiver import CaptureReceiver
from learner.recovery import Recovery
from learner.replay import Replay
from learner.reporter import Reporter
from learner.request import CapturedRequest
from learner.schedule import rate_share
from learner.trainer import Diverged, Trainer
from learner.vocabulary import VocabularyChoice
from wire.artifact import TrainingReport
from wire.control import LearnerReport
from wire.errors import ConfigError
from wire.spec import SCHEMA_VERSION, weights_revision
from wire.store import DraftStore

log = logging.getLogger(__name__)

_LOG_EVERY_S = 5.0
_GATES_SKIPPED_AFTER_ROLL_BACK = 3

MakeTrainer = Callable[[Draft, TargetParts, TrainSettings], Trainer]


@dataclass(frozen=True)
class Buffer:
    """What the replay held when it last changed; oldest_at_s is Unix time."""

    num_requests: int
    num_tokens: int
    oldest_at_s: float


class LearningSession:
    """Built from a configuration and the version to start from. Raises ConfigError or ArtifactError where these do not fit."""

    def __init__(self, config: LearnerConfig, version: int, make_trainer: MakeTrainer = Trainer) -> None:
        settings = config.learner
        torch.manual_seed(settings.train.seed)
        self._config, self._settings = config, settings
        self._directory = config.state_dir / "learner"
        self._store = DraftStore(config.state_dir)
        self._spec = self._store.manifest(version).spec
        if weights_revision(config.target_dir) != self._spec.target_revision:
            raise ConfigError(
                f"draft {version} was made for another target than {config.target_dir}; make one with `paceline draft init`"
            )
        target = load_target_parts(config.target_dir)
        self.vocabulary = VocabularyChoice(
            control_token_ids(config.target_dir), target.head_VD, settings.train.min_coverage_gain
        )
        self._known_active = version
        self._num_dropped_requests = 0
        self._state = "waiting"
        self._rate = Rate(window_s=10.0)
        self.history = History(self._directory)
        self.replay = Replay(settings.replay, self._spec.vocab_size, settings.train.seed)
        self.coverage = CoverageMeter(self._store, settings.replay.max_groups)
        self.archive = RequestArchive(self._directory / "requests", self._spec)
        self.assembler = Assembler(
            max_open_rows=settings.replay.max_open_rows,
            max_completion_rows=settings.replay.max_completion_rows,
            max_context_rows=settings.train.max_context_rows,
            idle_timeout_s=settings.replay.idle_timeout_s,
        )
        self.trainer = make_trainer(load_draft(self._store, version, self._spec, target), target, settings.train)
        self.origin = f"draft {version}"
        client = AdminClient(config.admin_url)
        self.publisher = Publisher(
            self._store,
            client,
            Evaluator(
                target,
                config.num_speculative_tokens,
                dtype=self.trainer.dtype,
                max_context_rows=settings.train.max_context_rows,
                device=self.trainer.device,
            ),
            spec=self._spec,
            target=target,
            settings=settings.gate,
            keep_versions=settings.keep_versions,
        )
        archived = []
        for request in self.archive.read_all():
            self._remember(request, on_disk=False)
            archived.append(request.key)
        self._recovery = Recovery(self._directory, self._spec, self.trainer, self.replay, self.publisher, self.history)
        if self._recovery.resume():
            self.origin = f"its checkpoint at step {self.trainer.num_steps}"
        remembered = {request.key for request in self.replay.everything()}
        self._forget([key for key in archived if key not in remembered])  # the checkpoint's visits push some out
        self._buffer = self._measure_buffer()
        now_s = time.monotonic()
        self._gate_at_s = now_s + settings.gate.every_s
        self._checkpoint_at_s = now_s + settings.checkpoint_every_s
        self._log_at_s = now_s
        self._steps_at_gate = -1
        self.receiver = CaptureReceiver(
            config.capture_endpoint,
            self._spec,
            max_queued_messages=settings.replay.max_queued_messages,
            max_queued_bytes=settings.replay.max_queued_bytes,
        )
        self.reporter = Reporter(client, self.report)

    @property
    def is_paused(self) -> bool:
        orders = self.reporter.orders
        return orders is not None and orders.paused

    @property
    def active_version(self) -> int:
        """What serves now, by the gateway's word, else by the store's."""
        orders = self.reporter.orders
        active = orders.active_version if orders is not None and self.reporter.is_connected else self._store.active()
        return self._known_active if active is None else active

    def receive(self) -> None:
        """Everything that arrived since the last call goes into the replay."""
        finished = [request for received in self.receiver.take() for request in self.assembler.add(received)]
        finished += self.assembler.expire()
        for request in finished:
            self.coverage.note(request, self.active_version)
            self._remember(request, on_disk=self._settings.replay.on_disk)
        if finished:
            self._buffer = self._measure_buffer()

    def train(self) -> bool:
        """One step; False where there is nothing to learn from now."""
        batch = self.replay.draw(self._settings.train.batch_tokens)
        if not batch:
            return False
        self._state = "training"
        share = rate_share(self.replay.num_tokens, self._settings.train.settling_tokens)
        try:
            result = self.trainer.step(batch, share)
        except NoAnchor:
            return True
        except Diverged as error:
            self._recovery.restore(str(error), rate_factor=0.5)
            self._drop(batch, str(error))
            return True
        except (IndexError, RuntimeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
            self._recovery.restore(reason, rate_factor=1.0)
            self._drop(batch, reason)
            return True
        self._recovery.note_clean_step()
        self._rate.add(result.num_tokens)
        if time.monotonic() >= self._log_at_s:
            self._log_at_s = time.monotonic() + _LOG_EVERY_S
            self.history.write(
                "step",
                num_steps=self.trainer.num_steps,
                num_tokens_seen=self.trainer.num_tokens_seen,
                num_tokens_distinct=self.replay.num_tokens_distinct,
                loss=result.loss,
                kl=result.kl,
                agreement=result.agreement,
                rate_share=share,
                tokens_per_s=self._rate.per_s(),
                buffer_tokens=self.replay.num_tokens,
            )
        return True

    def rest(self, state: str, seconds: float) -> None:
        self._state = state
        time.sleep(seconds)

    def gate_is_due(self) -> bool:
        """Only with something new to show, and with a gateway that could act on it."""
        num_new_steps = self.trainer.num_steps - max(self._steps_at_gate, 0)
        unjudged_every_steps = self._settings.gate.unjudged_every_steps
        is_new = num_new_steps >= max(unjudged_every_steps, 1)
        is_time = unjudged_every_steps > 0 or time.monotonic() >= self._gate_at_s
        return is_new and is_time and self.reporter.is_connected and not self.is_paused

    def gate(self) -> None:
        if self._was_rolled_back():
            return
        self._state = "publishing"
        self.vocabulary.refresh(self.trainer, self.replay, self.history, self.coverage.view)
        self._steps_at_gate = self.trainer.num_steps
        active = self.active_version
        decided = sum(self.publisher.decisions.values())
        outcome = self.publisher.consider(self.trainer.candidate(), self._training_report(), self.replay, active)
        self._drop(self.publisher.take_unscorable(), "could not be scored")
        if outcome != "waiting":
            self._forget(self.replay.note_counted())
        report = self.publisher.last_gate if sum(self.publisher.decisions.values()) > decided else None
        self.history.write("gate", outcome=outcome, reason=self.publisher.last_outcome, active_version=active, report=report)
        self._gate_at_s = time.monotonic() + self._settings.gate.every_s

    def _was_rolled_back(self) -> bool:
        """Our last draft serves no more: the canary or an operator disagreed with the gate. Learn more before asking again."""
        last = self.publisher.last_activated
        if last is None or last == self.active_version:
            return False
        self.publisher.last_activated = None
        self._gate_at_s = time.monotonic() + _GATES_SKIPPED_AFTER_ROLL_BACK * self._settings.gate.every_s
        self.history.write("rolled_back", version=last, active_version=self.active_version)
        return True

    def checkpoint_is_due(self) -> bool:
        return time.monotonic() >= self._checkpoint_at_s

    def checkpoint(self) -> None:
        """Keep the present state in memory and on disk; a full disk is told, not raised. What is too old to be kept goes first."""
        self._checkpoint_at_s = time.monotonic() + self._settings.checkpoint_every_s
        if (max_age_s := self._settings.replay.max_age_s) is not None:
            self._take_out(self.replay.captured_before(time.time() - max_age_s))
        self._recovery.save()

    def report(self) -> LearnerReport:
        """Called on the reporter's thread; reads only, and no container the loop changes."""
        buffer = self._buffer
        return LearnerReport(
            schema_version=SCHEMA_VERSION,
            state=self._state,
            sent_at_s=time.time(),
            num_steps=self.trainer.num_steps,
            loss=self.trainer.mean_kl,
            tokens_per_s=self._rate.per_s(),
            num_tokens_seen=self.trainer.num_tokens_seen,
            buffer_requests=buffer.num_requests,
            buffer_tokens=buffer.num_tokens,
            buffer_oldest_s=max(time.time() - buffer.oldest_at_s, 0.0) if buffer.num_requests else 0.0,
            capture_lag_s=self.receiver.lag_s,
            num_received_rows=self.receiver.num_received_rows,
            num_refused_messages=self.receiver.num_refused,
            num_restores=self._recovery.num_restores,
            num_timed_out_requests=self.assembler.num_timed_out,
            num_evicted_requests=self.assembler.num_evicted,
            num_late_spans=self.assembler.num_late_spans,
            num_cut_rows=self.assembler.num_cut_rows,
            num_dropped_requests=self._num_dropped_requests,
            simulated_al=self.publisher.simulated_al,
            num_published=self.publisher.num_published,
            gate=self.publisher.last_gate,
            num_gate_decisions={name: self.publisher.decisions[name] for name in ("accepted", "rejected")},
            outcome=self.publisher.last_outcome,
            vocabulary_coverage=self.coverage.view,
            wanted_vocabulary_size=self.vocabulary.wanted_size,
            vocabulary_shortfall=self.vocabulary.shortfall,
        )

    def close(self) -> None:
        """Stop threads and write a last checkpoint."""
        self.reporter.close()
        self.receiver.close()
        self.checkpoint()

    def _measure_buffer(self) -> Buffer:
        return Buffer(self.replay.num_requests, self.replay.num_tokens, self.replay.oldest_s)

    def _remember(self, request: CapturedRequest, *, on_disk: bool) -> None:
        if request.key in self.replay:  # its beginning, which was closed early: all that is cached goes by the key
            return
        gone = self.replay.add(request)
        if on_disk and request.key not in gone:
            self.archive.write(request)
        self._forget(gone)

    def _forget(self, keys: Sequence[str]) -> None:
        """Drop what belongs to requests that the replay remembers no longer."""
        self.trainer.forget(keys)
        for key in keys:
            self.archive.remove(key)

    def _drop(self, batch: Sequence[CapturedRequest], reason: str) -> None:
        """Forget requests that made a step or a judgement fail: used again they would make the next one fail too."""
        if not batch:
            return
        keys = {request.key for request in batch}
        self._take_out(keys)
        self._num_dropped_requests += len(keys)
        log.warning("dropped %d requests: %s", len(keys), reason)
        self.history.write("dropped", num_requests=len(keys), reason=reason)

    def _take_out(self, keys: set[str]) -> None:
        """Of these requests nothing stays, in memory or on disk."""
        self.replay.drop(keys)
        self._forget(list(keys))
        self._buffer = self._measure_buffer()

    def _training_report(self) -> TrainingReport:
        return TrainingReport(
            num_steps=self.trainer.num_steps,
            num_tokens_seen=self.trainer.num_tokens_seen,
            num_tokens_distinct=self.replay.num_tokens_distinct,
            loss=self.trainer.mean_kl or 0.0,
            seed=self._settings.train.seed,
        )
