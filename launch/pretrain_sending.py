"""Sending a set of prompts to a running system, and the record of which are answered, so that an interrupted run goes on."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loadtest.client import StreamResult
    from loadtest.traffic import Prompt

_ANSWER_TOKENS = 512
_STOP_S = 10.0


class Record:
    """Which prompts of a set are answered (those given up are not), and how much the learner had seen before the first: a file that only grows.

    Its name is a digest of the prompts' ids, so the record belongs to the prompts, wherever their file lies.
    """

    def __init__(self, directory: Path, prompts: list[Prompt]) -> None:
        ids = "\n".join(prompt.id for prompt in prompts)
        self._path = directory / f"{hashlib.sha256(ids.encode()).hexdigest()[:16]}.jsonl"
        self.num_tokens_before: int | None = None
        """Token visits; None before the learner was first heard."""
        self.num_prompts = len(prompts)
        done = self._read()
        self.remaining = [prompt for prompt in prompts if prompt.id not in done]
        """When this record was opened, in order."""
        self.num_done = self.num_prompts - len(self.remaining)
        """Kept up to date."""

    def begin(self, num_tokens_seen: int) -> int:
        """Note what the learner has seen, unless that was done before; returns what is noted."""
        if self.num_tokens_before is None:
            self.num_tokens_before = num_tokens_seen
            self._append({"num_tokens_before": num_tokens_seen})
        return self.num_tokens_before

    def add(self, prompt_id: str) -> None:
        """Note a prompt as answered; raises OSError."""
        self._append({"answered": prompt_id})
        self.num_done += 1

    def _append(self, entry: dict[str, str | int]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write("\n" + json.dumps(entry))  # a line that was cut short by a kill spoils no other

    def _read(self) -> set[str]:
        done = set()
        lines = self._path.read_text().splitlines() if self._path.is_file() else []
        for line in lines:
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if "num_tokens_before" in entry:
                self.num_tokens_before = entry["num_tokens_before"]
            done.add(entry.get("answered"))
        return done


class Sender:
    """Sends what is not answered yet, in a thread of its own, each prompt until it is answered or given up."""

    def __init__(self, url: str, model: str, record: Record, concurrency: int) -> None:
        self._url, self._model, self._record, self._concurrency = url, model, record, concurrency
        self._stopping = threading.Event()
        self.is_waiting = False
        """Set it: nothing more is sent while it holds."""
        self._thread = threading.Thread(target=self._run, name="pretrain-sender", daemon=True)
        self.num_failed = 0
        """Prompts that were given up; the next run tries them again."""
        self.num_answer_tokens = 0
        self.failure: str | None = None
        """Why nothing more is sent, where that is no plan."""

    @property
    def num_left(self) -> int:
        return self._record.num_prompts - self._record.num_done - self.num_failed

    def start(self) -> None:
        self._thread.start()

    def send_no_more(self) -> None:
        """Answers under way are still read."""
        self._stopping.set()

    def stop(self) -> None:
        """Answers under way are abandoned after a moment."""
        self.send_no_more()
        if self._thread.is_alive():
            self._thread.join(timeout=_STOP_S)

    def _run(self) -> None:
        from loadtest.closed_loop import answer_each

        try:
            asyncio.run(
                answer_each(
                    self._url,
                    self._model,
                    self._record.remaining,
                    concurrency=self._concurrency,
                    should_stop=self._stopping.is_set,
                    should_wait=lambda: self.is_waiting,
                    on_result=self._note,
                    options={"max_tokens": _ANSWER_TOKENS, "temperature": 0.0},
                )
            )
        except OSError as error:
            self.failure = f"cannot note which prompts are answered: {error}"
        except Exception as error:  # noqa: BLE001 -- outermost of a thread; whoever waits for its answers has to know
            self.failure = f"cannot send prompts: {type(error).__name__}: {error}"

    def _note(self, result: StreamResult) -> None:
        self.num_answer_tokens += result.num_tokens
        if result.is_ok:
            self._record.add(result.prompt_id)
        else:
            self.num_failed += 1
