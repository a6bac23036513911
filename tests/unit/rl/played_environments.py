"""Environments with gymnasium's interface, for workers to import: a simulator, and some that misbehave."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any


class Corridor:
    """Walk to the treasure, left or right; a reward of 1 there, -0.1 for every step."""

    def __init__(self, length: int = 9) -> None:
        self._length = length

    def reset(self, *, seed: int) -> tuple[Any, dict[str, Any]]:
        rng = random.Random(seed)
        self._place, self._treasure = rng.sample(range(self._length), 2)
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._place = min(self._length - 1, max(0, self._place + (1 if action == 1 else -1)))
        has_found = self._place == self._treasure
        return self._seen(), 1.0 if has_found else -0.1, has_found, False, {"place": self._place}

    def close(self) -> None:
        pass

    def _seen(self) -> str:
        return f"You are at {self._place}, the treasure at {self._treasure}."


class TokenEcho(Corridor):
    """It observes token ids."""

    def reset(self, *, seed: int) -> tuple[Any, dict[str, Any]]:
        return [1, 2, seed], {}


class TupleState(Corridor):
    """Its state is a tuple of whole numbers, like that of gymnasium's Blackjack; what it tells besides has odd keys."""

    def _seen(self) -> Any:
        return self._place, self._treasure

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[Any, Any]]:
        return (*super().step(action)[:4], {3: "three", "place": self._place})


class Held(Corridor):
    """Notes in a file what is opened and closed."""

    def __init__(self, notes: str, how: str = "") -> None:
        super().__init__()
        self._notes, self._how = notes, how
        self._note("opened")

    def reset(self, *, seed: int) -> tuple[Any, dict[str, Any]]:
        if self._how == "broken reset":
            raise RuntimeError("no reset")
        return super().reset(seed=seed)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._how == "broken step":
            raise RuntimeError("no step")
        return super().step(action)

    def close(self) -> None:
        self._note("closed")
        if self._how == "broken close":
            raise RuntimeError("no close")

    def _note(self, word: str) -> None:
        with open(self._notes, "a") as notes:
            notes.write(word + "\n")


class Misbehaving(Corridor):
    """Every step does what `how` says."""

    def __init__(self, how: str, marker: str = "") -> None:
        super().__init__()
        self._how = how
        self._marker = marker

    def reset(self, *, seed: int) -> tuple[Any, dict[str, Any]]:
        if self._how == "differ" and os.path.exists(self._marker):
            return "another world", {}
        return super().reset(seed=seed)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        match self._how:
            case "raise":
                raise RuntimeError("the simulator is broken")
            case "nan":
                return "", float("nan"), True, False, {}
            case "hang":
                time.sleep(3600)
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "print":
                print("\x00\x00\x00\x01garbage", flush=True)
                os.write(1, b"\xff" * 64)
            case "differ" if not os.path.exists(self._marker):
                with open(self._marker, "w"):
                    pass
                os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


class Talk(Corridor):
    """It says something after each answer, so many times, and gives every answer the same reward."""

    def __init__(self, num_turns: int = 1, broken_from: int = 1 << 20) -> None:
        super().__init__()
        self._num_turns = num_turns
        self._broken_from = broken_from
        self._num_said = 0

    def reset(self, *, seed: int) -> tuple[Any, dict[str, Any]]:
        if seed >= self._broken_from:
            raise RuntimeError("there are no such problems")
        return f"Problem {seed}?", {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._num_said += 1
        return f"Go on {self._num_said}.", 1.0, self._num_said == self._num_turns, False, {}


class Even(Talk):
    """It gives 4 for an answer of an even number of characters, nothing for any other."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        seen, _, *rest = super().step(action)
        return seen, 4.0 * (len(action) % 2 == 0), *rest
