"""LiveEngine: a real engine process, its private routes, and what it says on its two channels."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import zmq
from waiting import DEADLINE_S, wait_until

from launch.host import find_openmp
from server.config import CaptureSettings, EnginePartsConfig
from wire.frames import check_capture
from wire.messages import TOPIC_STATS, CaptureStep, EngineStats, decode
from wire.ports import free_ports

TOKEN = "engine-test-token"
START_DEADLINE_S = 480.0
MARKER = "settle-mark"
CPU_WORKER = "server.engine.worker_cpu.PacelineCpuWorker"


class Captured(NamedTuple):
    message: CaptureStep
    aux: memoryview
    hidden: memoryview


class Completion(NamedTuple):
    request_id: str
    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    metrics: dict[str, Any]

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + self.token_ids


class Listener:
    """The learner's end of the capture channel and a subscriber of events."""

    def __init__(self, capture_endpoint: str, events_endpoint: str) -> None:
        self.captured: list[Captured] = []
        self.events: list[CaptureStep] = []
        self.stats: list[EngineStats] = []
        self.marks: set[tuple[str, str]] = set()
        """What has come of marked requests: (request id, `captured`, `event` or `ended`)."""
        self.events_endpoint = events_endpoint
        self._context = zmq.Context()
        self._pull = self._context.socket(zmq.PULL)
        self._pull.bind(capture_endpoint)
        self._sub = self._context.socket(zmq.SUB)
        self._sub.subscribe(b"")
        self._sub.connect(events_endpoint)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def clear(self) -> None:
        self.captured.clear()
        self.events.clear()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._pull, zmq.POLLIN)
        poller.register(self._sub, zmq.POLLIN)
        while not self._stop.is_set():
            for socket, _ in poller.poll(50):
                parts = socket.recv_multipart()
                if socket is self._pull:
                    message = decode(parts[0])
                    assert isinstance(message, CaptureStep)
                    rest = self._without_marks(message, "captured")
                    if rest.spans or rest.finished_ids:
                        self.captured.append(Captured(rest, *check_capture(message, parts[1:])))
                elif parts[0] == TOPIC_STATS:
                    self.stats.append(decode(parts[1]))
                elif (rest := self._without_marks(decode(parts[1]), "event")).spans:
                    self.events.append(rest)

    def _without_marks(self, message: CaptureStep, channel: str) -> CaptureStep:
        """What a step says of other requests. A mark runs alone: where it has rows, nobody else has."""
        self.marks.update((span.request_id, channel) for span in message.spans if MARKER in span.request_id)
        self.marks.update((request_id, "ended") for request_id in message.finished_ids if MARKER in request_id)
        spans = [span for span in message.spans if MARKER not in span.request_id]
        finished_ids = [request_id for request_id in message.finished_ids if MARKER not in request_id]
        return msgspec.structs.replace(message, spans=spans, finished_ids=finished_ids)


class LiveEngine:
    def __init__(
        self, url: str, model: str, state_dir: Path, target_dir: Path, listener: Listener, process: subprocess.Popen[bytes]
    ) -> None:
        self.url, self.model, self.state_dir, self.target_dir = url, model, state_dir, target_dir
        self.listener = listener
        self.process = process
        self.digests_at_start: dict[str, str] = {}
        """Where the test session keeps them."""
        self._num_marks = 0

    def metric(self, name: str) -> float:
        """Sum over the series of one of vLLM's metrics, 0 where there is none."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=DEADLINE_S) as response:
            lines = response.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)

    def kill(self) -> None:
        """SIGKILL to the whole engine."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def call(self, path: str, body: Any = None, *, token: str | None = TOKEN) -> tuple[int, Any]:
        """(status, decoded JSON) of a GET, or of a POST where there is a body."""
        headers = {"Content-Type": "application/json"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(self.url + path, data=data, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=300) as response:
                return response.status, json.loads(response.read() or b"null")
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read() or b"null")

    def ok(self, path: str, body: Any = None) -> Any:
        status, answer = self.call(path, body)
        assert status == 200, (status, answer)
        return answer

    def rpc(self, method: str, *args: Any) -> Any:
        """What worker 0 answers to a method of its class."""
        return self.ok("/test/rpc", {"method": method, "args": list(args)})[0]

    def core(self, method: str, *args: Any) -> Any:
        """What the engine core answers to a method of its class."""
        return self.ok("/test/core", {"method": method, "args": list(args)})

    def complete(self, prompt: str | list[int], **options: Any) -> Completion:
        """One completion of 32 greedy tokens unless `options` say otherwise."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": 32,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
        } | options
        answer = self.ok("/v1/completions", body)
        choice = answer["choices"][0]
        return Completion(
            answer["id"], choice["prompt_token_ids"], choice["token_ids"], choice["text"], answer.get("metrics") or {}
        )

    def complete_all(self, prompts: list[str] | list[list[int]], **options: Any) -> list[Completion]:
        """All prompts at once."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.complete(prompt, **options), prompts))

    def stage(self, version: int) -> None:
        self.ok("/paceline/stage", {"version": version})

    def commit(self, version: int) -> dict[str, Any]:
        return self.ok("/paceline/commit", {"version": version, "expected_active": self.active()})

    def swap(self, version: int) -> dict[str, Any]:
        self.stage(version)
        return self.commit(version)

    def active(self) -> int:
        return self.ok("/paceline/status")["workers"][0]["draft_version"]

    def set_depth(self, depth: int) -> None:
        self.ok("/paceline/depth", {"depth": depth})

    def settle(self) -> None:
        """Wait until all that earlier requests left on the channel has come: it keeps its order, so a marked request's
        capture, event and end come after. To be called where nothing else runs and everything is captured.
        """
        self._num_marks += 1
        mark = f"{MARKER}-{self._num_marks}-"
        self.complete([1, 2, 3], max_tokens=1, request_id=mark)

        def seen() -> set[str]:
            return {what for request_id, what in self.listener.marks.copy() if mark in request_id}

        wait_until(lambda: seen() == {"captured", "event", "ended"}, "for the marked request to pass the channel")

    def fresh_stats(self) -> EngineStats:
        """Counters sent after this call."""
        asked_s = time.time()
        wait_until(lambda: any(stats.sent_at_s >= asked_s for stats in self.listener.stats[-1:]), "for fresh counters")
        return self.listener.stats[-1]

    def spans_of(self, completion: Completion) -> list[tuple[CaptureStep, Any]]:
        """Captured spans of one completion, in the order they were computed."""
        return [
            (captured.message, span)
            for captured in list(self.listener.captured)
            for span in captured.message.spans
            if completion.request_id in span.request_id
        ]

    def tokens_by_position(self, completion: Completion) -> dict[int, int]:
        """Tokens the capture reports for one request; a position reported twice must agree."""
        seen: dict[int, int] = {}
        for _, span in self.spans_of(completion):
            first_emitted = span.first_position + span.num_valid_rows
            for position, token in [
                *enumerate(span.token_ids[: span.num_valid_rows], span.first_position),
                *enumerate(span.emitted_ids[-1:], first_emitted),
            ]:
                assert seen.setdefault(position, token) == token
        return seen


@contextlib.contextmanager
def start_engine(
    target_dir: Path,
    state_dir: Path,
    draft_vocab_size: int,
    *,
    options: list[str],
    worker_cls: str = CPU_WORKER,
    engine_id: str = "engine-under-test",
    core: int = 0,
    variables: Mapping[str, str] | None = None,
) -> Iterator[LiveEngine]:
    """`variables` are added to the engine's environment."""
    port, capture_port, events_port = free_ports(3)
    parts = EnginePartsConfig(
        engine_id=engine_id,
        state_dir=state_dir,
        target_dir=target_dir,
        draft_vocab_size=draft_vocab_size,
        aux_layer_ids=None,
        capture=CaptureSettings(),
        capture_endpoint=f"tcp://127.0.0.1:{capture_port}",
        events_endpoint=f"tcp://127.0.0.1:{events_port}",
    )
    speculation = {
        "method": "eagle3",
        "model": str(state_dir / "drafts" / "active"),
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 16, 2]],
    }
    argv = [
        *(sys.executable, "-m", "server.engine.serve", str(target_dir), "--host", "127.0.0.1", "--port", str(port)),
        *("--served-model-name", target_dir.name, "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"),
        *("--worker-cls", worker_cls, "--weight-transfer-config", '{"backend":"paceline"}'),
        *("--speculative-config", json.dumps(speculation), "--block-size", "32", "--kv-cache-memory-bytes", str(1 << 29)),
        *("--enable-prefix-caching", "--per-request-spec-decode-metrics", "detailed", *options),
    ]
    environment = os.environ | {
        "PACELINE_ENGINE_CONFIG": parts.model_dump_json(),
        "PACELINE_ENGINE_TOKEN": TOKEN,
        "VLLM_PLUGINS": "paceline,paceline_control,engine_test_rpc,engine_test_core",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
        "PYTHONPATH": os.pathsep.join(str(path) for path in (Path(__file__).parent, Path(__file__).parent / "plugins")),
    }
    environment |= variables or {}
    openmp = find_openmp()
    if openmp is not None:
        environment["LD_PRELOAD"] = str(openmp)
    log_path = state_dir / f"{engine_id}.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(argv, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    listener = Listener(parts.capture_endpoint, parts.events_endpoint)
    engine = LiveEngine(f"http://127.0.0.1:{port}", target_dir.name, state_dir, target_dir, listener, process)
    try:
        _wait_until_healthy(engine, log_path)
        yield engine
    finally:
        listener.close()
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)


def _wait_until_healthy(engine: LiveEngine, log_path: Path) -> None:
    deadline_s = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < deadline_s:
        if engine.process.poll() is not None:
            raise RuntimeError(f"the engine ended with {engine.process.returncode}:\n{log_path.read_text()[-4000:]}")
        with contextlib.suppress(OSError):
            if urllib.request.urlopen(engine.url + "/health", timeout=10).status == 200:
                return
        time.sleep(0.5)
    raise RuntimeError(f"the engine was not healthy within {START_DEADLINE_S:.0f} s:\n{log_path.read_text()[-4000:]}")
