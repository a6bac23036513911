"""One answer of the policy, over as many requests as it takes: a stream that breaks goes on elsewhere from the tokens it brought."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field
from functools import partial

from msgspec.structs import replace

from rl.generator.answer import Answer, BadAnswer
from rl.generator.config import GeneratorSettings
from rl.generator.counts import GeneratorCounts
from rl.generator.gateway import Gateway, GenerateRequest, Lost, Refused, Sampling, Unable
from rl.generator.seats import Preempted, Seats
from rl.generator.state import OpenRollout, PartialTurn, PlayedTurn
from rl.generator.target_watch import TargetWatch
from rl.trajectory import Trajectory
from wire.errors import ConfigError

MAX_BAD_ANSWERS = 8
"""In a row, of one turn: then the group is given up, so that no run waits for it."""
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.1, 10.0


class TurnFailed(Exception):
    """This answer cannot be had; the group is given up."""


@dataclass(eq=False, slots=True)
class RunningRollout:
    """One rollout of a running group, while a task plays it."""

    group_id: int
    environment: str
    temperature: float
    saved: OpenRollout
    """All of it but what the stream under way has brought."""
    answer: Answer | None = None
    """That stream's."""
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def id(self) -> str:
        return f"{self.group_id}.{self.saved.sample_index}"

    @property
    def num_tokens(self) -> int:
        partial = self.saved.partial
        num_played = sum(len(played.turn.output_token_ids) for played in self.saved.turns)
        num_arrived = self.answer.num_tokens if self.answer is not None else 0
        return num_played + (len(partial.output_token_ids) if partial is not None else 0) + num_arrived

    def finish(self, trajectories: tuple[Trajectory, ...]) -> None:
        self.saved = replace(self.saved, turns=(), partial=None, finished=trajectories)

    def begin_anew(self, now_s: float) -> None:
        """After its environment failed; nothing of it is kept."""
        saved = self.saved
        self.saved = OpenRollout(sample_index=saved.sample_index, submitted_s=now_s, attempt=saved.attempt + 1)

    def snapshot(self) -> OpenRollout:
        """With the tokens of the stream under way whose target is known."""
        if self.answer is None or self.saved.partial is None:
            return self.saved
        return replace(self.saved, partial=_extended(self.saved.partial, self.answer))


class Turns:
    """Draws answers through the gateway."""

    def __init__(
        self,
        settings: GeneratorSettings,
        gateway: Gateway,
        seats: Seats,
        watch: TargetWatch,
        counts: GeneratorCounts,
        *,
        vocab_size: int,
        stop_token_ids: tuple[int, ...],
    ) -> None:
        self._settings = settings
        self._gateway = gateway
        self._seats = seats
        self._watch = watch
        self._counts = counts
        self._vocab_size = vocab_size
        self._stop_token_ids = stop_token_ids

    async def draw(self, rollout: RunningRollout, context: tuple[int, ...], *, max_tokens: int) -> PlayedTurn:
        """Finish the rollout's partial turn, whose prompt ends `context`. Raises TurnFailed, ConfigError where no turn can be had."""
        num_bad, pause_s = 0, _FIRST_PAUSE_S
        while True:
            turn = rollout.saved.partial
            assert turn is not None
            if ended := self._end_of(turn, max_tokens):
                return turn.finished(ended)
            try:
                await self._request(rollout, context, turn, max_tokens=max_tokens - len(turn.output_token_ids))
                continue
            except Preempted:
                continue
            except Unable as error:
                raise ConfigError(f"the gateway cannot serve rollouts: {error}") from error
            except Refused as error:
                raise TurnFailed(f"the gateway refuses it: {error}") from error
            except BadAnswer as error:
                self._counts.num_bad_answers += 1
                num_bad += 1
                if num_bad == MAX_BAD_ANSWERS:
                    raise TurnFailed(f"{num_bad} answers in a row cannot be believed, the last because {error}") from error
            except Lost as error:
                self._counts.num_lost += 1
                pause_s = min(error.retry_after_s or pause_s, _LAST_PAUSE_S)
            if rollout.saved.partial != turn:
                num_bad, pause_s = 0, _FIRST_PAUSE_S
            await asyncio.sleep(pause_s)
            pause_s = min(2.0 * pause_s, _LAST_PAUSE_S)

    def _end_of(self, turn: PartialTurn, max_tokens: int) -> str:
        """Why a turn has ended, also where its stream broke before it could say so; empty where it has not."""
        if turn.finish_reason:
            return turn.finish_reason
        if turn.output_token_ids and turn.output_token_ids[-1] in self._stop_token_ids:
            return "stop"
        return "length" if len(turn.output_token_ids) >= max_tokens else ""

    async def _request(self, rollout: RunningRollout, context: tuple[int, ...], turn: PartialTurn, *, max_tokens: int) -> None:
        """One request; keeps what it brought. Raises Preempted, Lost, Refused or BadAnswer where that may not be all."""
        async with self._seats.seat(rollout.id) as priority:
            is_certain = partial(self._watch.is_certain, self._watch.mark())
            answer = Answer(max_tokens=max_tokens, vocab_size=self._vocab_size, is_certain=is_certain)
            request = GenerateRequest(
                token_ids=context + turn.output_token_ids,
                sampling_params=Sampling(
                    max_tokens=max_tokens,
                    temperature=rollout.temperature,
                    seed=self._seed(rollout),
                    stop_token_ids=self._stop_token_ids,
                ),
                cache_salt=str(self._watch.version),
                priority=priority,
            )
            rollout.saved = replace(rollout.saved, num_requests=rollout.saved.num_requests + 1)
            self._counts.num_requests += 1
            rollout.answer = answer
            is_believed = True
            try:
                await self._gateway.stream(request, answer, domain=rollout.environment)
            except BadAnswer:
                is_believed = False
                raise
            finally:
                rollout.answer = None
                if is_believed:
                    self._keep(rollout, turn, answer)
        if answer.finish_reason == "abort":
            raise Lost("the engine gave it up")

    def _keep(self, rollout: RunningRollout, turn: PartialTurn, answer: Answer) -> None:
        extended = _extended(turn, answer)
        num_kept = len(extended.output_token_ids) - len(turn.output_token_ids)
        rollout.saved = replace(rollout.saved, partial=extended)
        self._counts.num_tokens += num_kept
        self._counts.num_unattributed_tokens += answer.num_tokens - num_kept

    def _seed(self, rollout: RunningRollout) -> int:
        """Another one for each request: an engine that goes on with used random numbers would draw the same places of another text."""
        place = (self._settings.seed, rollout.group_id, rollout.saved.sample_index, rollout.saved.attempt)
        text = ".".join(map(str, (*place, rollout.saved.num_requests)))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def _extended(turn: PartialTurn, answer: Answer) -> PartialTurn:
    """With what can be kept of an answer; the draft is that of the turn's first tokens."""
    if not turn.output_token_ids:
        turn = replace(turn, draft_version=answer.draft_version)
    return turn.extended(answer.piece())
