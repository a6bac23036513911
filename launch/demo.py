"""`paceline demo`: start the system in the background, send it real prompts, show the draft learning, leave it serving."""

from __future__ import annotations

import asyncio
import shutil
import sys
import threading
import time
from pathlib import Path

import msgspec

from launch import models
from launch.config import SystemConfig
from launch.detached import start_and_wait
from launch.drafts import admin_client
from launch.rundir import LaunchError, RunDir
from launch.view import REFRESH_S, read_status, screen, swaps_committed
from wire.control import AdminStatus

_SWAPS_TO_SEE = 2
_LINGER_S = 60.0
_LONGEST_S = 20 * 60.0


def demo(config: SystemConfig, arguments: list[str], *, minutes: float | None, concurrency: int) -> int:
    """Run the demo; returns 0. Raises PacelineError. An interrupt while the view is shown ends only the demo."""
    if concurrency < 1:
        raise LaunchError(f"--concurrency {concurrency} would send nothing; give 1 or more")
    target_dir = models.ensure(config.target.path, lambda what, _share: print(f"target: {what}", flush=True))
    run_dir = RunDir(config.state.directory)
    if run_dir.is_locked():
        print(f"a system already runs from {run_dir.state}: using it", flush=True)
        system = run_dir.read_system()
    else:
        print("starting the system; the first start compiles the engine, which takes a minute or two on a CPU", flush=True)
        system = start_and_wait(config, arguments, lambda text: print(text, flush=True))
    print(
        f"sending HumanEval prompts, {concurrency} at a time; the draft starts at random and learns from the answers",
        flush=True,
    )
    traffic = BackgroundTraffic(str(system["gateway_url"]), target_dir.name, concurrency)
    try:
        traffic.start()
        _show(run_dir, traffic, minutes)
    except KeyboardInterrupt:
        pass
    finally:
        traffic.stop()
    print(farewell(str(system["gateway_url"]), target_dir.name, arguments), flush=True)
    return 0


class BackgroundTraffic:
    """Real prompts at a constant concurrency, in a thread of its own."""

    def __init__(self, url: str, model: str, concurrency: int) -> None:
        self._url, self._model, self._concurrency = url, model, concurrency
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="demo-traffic", daemon=True)
        self.failure: str | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop sending; answers under way are abandoned after a moment."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10.0)

    def _run(self) -> None:
        from loadtest.closed_loop import keep_busy
        from loadtest.sources import human_eval
        from loadtest.traffic import TrafficError

        try:
            prompts = human_eval.load().train
            asyncio.run(
                keep_busy(self._url, self._model, prompts, concurrency=self._concurrency, should_stop=self._stopping.is_set)
            )
        except (TrafficError, OSError) as error:
            self.failure = str(error)


def _show(run_dir: RunDir, traffic: BackgroundTraffic, minutes: float | None) -> None:
    """Until the demo is over; raises LaunchError where there is nothing to show any more."""
    client = admin_client(run_dir.state)
    started_at_s = time.monotonic()
    seen_at_s: float | None = None
    with screen() as show:
        while True:
            now_s = time.monotonic()
            if traffic.failure:
                raise LaunchError(f"no prompts to send: {traffic.failure}")
            try:
                status: AdminStatus | None = read_status(client)
                note = what_comes_next(status, minutes) if status else ""
            except LaunchError as error:
                if not run_dir.is_locked():
                    raise LaunchError("the system was stopped while the demo ran; `paceline demo` starts it again") from None
                status, note = None, str(error)
            show(status, note)
            if status and seen_at_s is None and swaps_committed(status) >= _SWAPS_TO_SEE:
                seen_at_s = now_s
            if is_over(now_s - started_at_s, minutes, None if seen_at_s is None else now_s - seen_at_s):
                return
            time.sleep(REFRESH_S)


def is_over(elapsed_s: float, minutes: float | None, since_enough_swaps_s: float | None) -> bool:
    """With `minutes`, then; without, a while after the second swap, and never later than twenty minutes."""
    if minutes is not None:
        return elapsed_s >= minutes * 60.0
    return elapsed_s >= _LONGEST_S or (since_enough_swaps_s is not None and since_enough_swaps_s >= _LINGER_S)


def what_comes_next(status: AdminStatus, minutes: float | None) -> str:
    """A sentence for the person who watches."""
    count = swaps_committed(status)
    end = f"ends after {minutes:g} minutes" if minutes is not None else "ends a minute after the second swap"
    if count == 0:
        return (
            f"waiting for the first better draft: the learner collects answers and trains, a few minutes; {end}, or at Ctrl-C"
        )
    return f"{count} swap{'s' if count > 1 else ''} so far, no request was interrupted; {end}, or at Ctrl-C"


def farewell(url: str, model: str, arguments: list[str]) -> str:
    """How to try it, watch it and stop it."""
    body = msgspec.json.encode(
        {
            "model": model,
            "messages": [{"role": "user", "content": "Write a Python function that reverses a list."}],
            "max_tokens": 128,
        }
    ).decode()
    tail = "".join(f" {word}" for word in arguments)
    command = own_command()
    return (
        "\nThe system is still serving and still learning. Try it:\n\n"
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'\n\n"
        f"Watch it: {command} view{tail}\nStop it:  {command} down{tail}"
    )


def own_command() -> str:
    """What to type to call this program again: its bare name where the shell finds it, else its path from here."""
    if shutil.which("paceline"):
        return "paceline"
    script = Path(sys.executable).with_name("paceline")
    here = Path.cwd()
    return str(script.relative_to(here) if script.is_relative_to(here) else script)
