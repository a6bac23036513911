"""A generator with real environment workers and a gateway's stand-in on a real socket, and what its groups have to be."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from generate_stand_in import FIRST, GenerateStandIn, logprob, token
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rl.controllers.concurrency import ConcurrencyLimits
from rl.environments.interface import Problem
from rl.environments.pool import EnvironmentPool
from rl.environments.registry import read_environments
from rl.generator.config import GeneratorSettings
from rl.generator.gateway import Gateway
from rl.generator.generator import Generator
from rl.generator.rendering import TargetText
from rl.generator.state import GeneratorState
from rl.staleness.ledger import Ledger, LedgerState
from rl.trajectory import Group, Trajectory

WORKERS_IMPORT = Path(__file__).parent / "rl"
DEADLINE_S = 120.0
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FORGETFUL = CHATML.replace("message['content']", "('...' if message['role'] == 'assistant' else message['content'])")
"""A template that leaves out what was answered before, as reasoning models' do with their thoughts."""
TALK = {"name": "talk", "kind": "gym", "factory": "played_environments:Talk", "reward_range": [0.0, 4.0]}


def make_target(directory: Path, template: str = CHATML) -> TargetText:
    directory.mkdir(parents=True, exist_ok=True)
    vocab = {name: number for number, name in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"eos_token": SPECIAL[1], "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "config.json").write_text(json.dumps({"vocab_size": len(vocab)}))
    return TargetText.load(directory)


def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """For environment workers, which import what tests define."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(WORKERS_IMPORT.parents[2]), str(WORKERS_IMPORT)]))


class Rig:
    """One life of a generator after the other, with one stand-in, one pool and one ledger."""

    def __init__(self, stand_in: GenerateStandIn, pool: EnvironmentPool, gateway: Gateway, target: TargetText) -> None:
        self.stand_in = stand_in
        self.pool = pool
        self.gateway = gateway
        self.target = target
        self.groups: list[Group] = []
        self.problem_of: Callable[[int], Problem] = lambda group_id: Problem("talk", group_id)
        self.ledger = Ledger(LedgerState(version=0), eta=1, groups_per_version=2)
        self.generator: Generator
        self._task: asyncio.Task[Any] | None = None

    def begin(self, resumed: GeneratorState | None = None, *, seats: int = 8, **settings: Any) -> None:
        limits = ConcurrencyLimits(least=seats, most=64)
        self.generator = Generator(
            GeneratorSettings(group_size=3, concurrency=limits, **settings),
            ledger=self.ledger,
            pool=self.pool,
            gateway=self.gateway,
            target=self.target,
            problem_of=self.problem_of,
            hand_over=self.groups.append,
            resumed=resumed,
        )
        self._task = asyncio.create_task(self.generator.run())

    async def end(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            task, self._task = self._task, None
            if not task.cancelled():
                raise AssertionError("the generator ended by itself") from task.exception()

    async def fails(self) -> tuple[Exception, ...]:
        """Wait for the generator to end by itself; gives the errors of its rollouts."""
        assert self._task is not None
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.wait([self._task])
        task, self._task = self._task, None
        error = task.exception()
        assert isinstance(error, ExceptionGroup)
        return error.exceptions

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                assert self._task is None or not self._task.done(), self._task.exception()
                await asyncio.sleep(0.002)

    async def train(self, count: int) -> None:
        """Until that many groups were taken, each update with its new target."""
        for _ in range(count):
            await self.until(lambda: self.ledger.take(1))
            self.change_target(min(self.stand_in.version + 1, 7))

    def change_target(self, version: int) -> None:
        self.generator.watch.begin()
        self.stand_in.version = version
        self.generator.watch.end(version)
        if version > self.ledger.state.version:
            self.ledger.advance(version)
        self.generator.wake()


@asynccontextmanager
async def rig(
    tmp_path: Path,
    *,
    talk: dict[str, Any] | None = None,
    template: str = CHATML,
    silence_s: float = 30.0,
    num_workers: int = 1,
    environments: list[dict[str, Any]] | None = None,
    **stand_in: Any,
) -> AsyncIterator[Rig]:
    target = make_target(tmp_path / "target", template)
    configs = read_environments(environments or [TALK | {"parameters": talk or {}}], source="test")
    newline_id, eos_id = target.encode("\n")[0], target.stop_token_ids[0]
    pool = await EnvironmentPool.start(configs, num_workers=num_workers)
    async with GenerateStandIn(newline_id=newline_id, eos_id=eos_id, **stand_in) as served:
        gateway = Gateway(served.url, silence_s=silence_s)
        made = Rig(served, pool, gateway, target)
        try:
            yield made
        finally:
            await made.end()
            await gateway.close()
            await pool.close()


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


def check(trajectory: Trajectory, eos_id: int) -> None:
    """Each token says itself where it stands and which target made it."""
    context: list[int] = []
    for turn in trajectory.turns:
        context += turn.prompt_token_ids
        versions = [span.target_version for span in turn.weight_spans for _ in range(span.end - span.start)]
        for token_id, value, version in zip(turn.output_token_ids, turn.behaviour_logprobs, versions, strict=True):
            assert value == logprob(token_id)
            if token_id != eos_id:
                assert token_id == token(len(context), version), (token_id - FIRST, len(context), version)
            context.append(token_id)
        assert turn.finish_reason == ("stop" if turn.output_token_ids[-1] == eos_id else "length")


def check_groups(rig: Rig, *, group_size: int = 3) -> None:
    """Complete, sound, and each handed over once."""
    assert rig.groups
    assert max(Counter(group.group_id for group in rig.groups).values()) == 1
    for group in rig.groups:
        assert sum(trajectory.forked_from is None for trajectory in group.trajectories) == group_size
        for trajectory in group.trajectories:
            check(trajectory, rig.stand_in.eos_id)
