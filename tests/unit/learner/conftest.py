"""A tiny target, its draft store, an engine that speaks the capture channel, and a gateway that answers the admin port."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from sample_messages import capture_span, capture_step

from drafter.batch import RequestRows
from drafter.create import create_random_draft
from drafter.target import TargetParts
from learner.request import CapturedRequest
from wire.frames import frame_for
from wire.messages import CaptureSpan, CaptureStep, encode
from wire.spec import CaptureSpec
from wire.store import DraftStore

sys.path.insert(0, str(Path(__file__).parent.parent / "drafter"))

from tiny_target import HIDDEN, NUM_AUX, spec, target, target_dir

__all__ = ["spec", "target", "target_dir"]


@pytest.fixture
def draft_vocab_size() -> int:
    return 48


@pytest.fixture
def state_dir(tmp_path: Path, spec: CaptureSpec, target_dir: Path) -> Path:
    """A state directory whose draft 0 is random and active."""
    store = DraftStore(tmp_path / "state")
    store.set_active(create_random_draft(store, spec, target_dir, seed=0))
    return tmp_path / "state"


@dataclass
class TinyWorld:
    """A language that can be learned: token t is followed by (3 t + 1) mod 40, and hidden rows say so."""

    head_VD: torch.Tensor

    def tokens(self, first: int, count: int) -> list[int]:
        tokens = [first % 40]
        while len(tokens) < count:
            tokens.append((3 * tokens[-1] + 1) % 40)
        return tokens

    def rows(self, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(aux, hidden) of input tokens: hidden points at the next token's head row."""
        next_tokens = [(3 * token + 1) % 40 for token in tokens]
        hidden = self.head_VD[next_tokens] * 2
        return torch.cat([self.head_VD[tokens], hidden, hidden], dim=-1).float(), hidden.float()


@pytest.fixture
def world(target: TargetParts) -> TinyWorld:
    return TinyWorld(target.head_VD)


@pytest.fixture
def make_request(world: TinyWorld) -> Callable[..., CapturedRequest]:
    def build(
        key: str = "e.r0", *, first: int = 1, prompt: int = 4, total: int = 16, domain: str = "code", prompt_key: str = ""
    ) -> CapturedRequest:
        tokens = world.tokens(first, total + 1)
        aux, hidden = world.rows(tokens[:-1])
        rows = RequestRows(torch.arange(total), torch.tensor(tokens[1:]), aux, hidden, prompt, 0.0)
        return CapturedRequest(key, prompt_key or key, "t", domain, rows, {}, time.time())

    return build


def span_of(request_id: str, first_position: int, token_ids: list[int], **values: Any) -> CaptureSpan:
    labels: dict[str, Any] = {"tenant": "t", "domain": "code"}
    return capture_span(request_id=request_id, first_position=first_position, token_ids=token_ids, **(labels | values))


@pytest.fixture
def make_span() -> Callable[..., CaptureSpan]:
    return span_of


@pytest.fixture
def make_step(spec: CaptureSpec) -> Callable[..., CaptureStep]:
    def build(spans: list[CaptureSpan], *, finished: tuple[str, ...] = (), **values: Any) -> CaptureStep:
        num_rows = sum(span.num_rows for span in spans)
        used = values.pop("spec", spec)
        tensors = [frame_for((num_rows, width), used.dtype) for width in (NUM_AUX * HIDDEN, HIDDEN)]
        defaults: dict[str, Any] = {"step": 0, "captured_at_s": time.time(), "tensors": tensors}
        return capture_step(*spans, spec=used, finished_ids=list(finished), **(defaults | values))

    return build


class FakeEngine:
    """Sends whole tiny requests the way an engine does: a prompt chunk, then verify steps."""

    def __init__(self, endpoint: str, world: TinyWorld, make_step: Callable[..., CaptureStep]) -> None:
        self._socket = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)
        self._world = world
        self._make_step = make_step

    def send(self, step: CaptureStep, aux: torch.Tensor, hidden: torch.Tensor) -> None:
        self._socket.send_multipart([encode(step), aux.numpy().tobytes(), hidden.numpy().tobytes()])

    def send_raw(self, frames: list[bytes]) -> None:
        self._socket.send_multipart(frames)

    def serve(self, request_id: str, first: int, prompt: int = 4, total: int = 20) -> None:
        tokens = self._world.tokens(first, total + 1)
        spans = [span_of(request_id, 0, tokens[:prompt], emitted_ids=[tokens[prompt]])]
        for position in range(prompt, total):
            spans.append(span_of(request_id, position, [tokens[position]], emitted_ids=[tokens[position + 1]]))
        for number, span in enumerate(spans):
            aux, hidden = self._world.rows(span.token_ids)
            finished = (request_id,) if number == len(spans) - 1 else ()
            self.send(self._make_step([span], finished=finished, step=number), aux, hidden)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def connect_engine(world: TinyWorld, make_step: Callable[..., CaptureStep]) -> Iterator[Callable[[str], FakeEngine]]:
    engines: list[FakeEngine] = []

    def connect(endpoint: str) -> FakeEngine:
        engines.append(FakeEngine(endpoint, world, make_step))
        return engines[-1]

    yield connect
    for engine in engines:
        engine.close()


@dataclass
class FakeGateway:
    """Answers the two admin routes; `refusal` is (status, code) for activations, `store` follows accepted ones."""

    store: DraftStore
    url: str = ""
    paused: bool = False
    refusal: tuple[int, str] | None = None
    activations: list[tuple[int, dict[str, Any], dict[str, str]]] = field(default_factory=list)
    reports: list[dict[str, Any]] = field(default_factory=list)


@pytest.fixture
def gateway(state_dir: Path) -> Iterator[FakeGateway]:
    fake = FakeGateway(DraftStore(state_dir))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            parts = self.path.strip("/").split("/")
            if parts == ["admin", "learner", "report"]:
                fake.reports.append(body)
                self._answer(200, {"paused": fake.paused, "active_version": fake.store.active()})
            elif parts[:2] == ["admin", "drafts"] and parts[3] == "activate":
                version = int(parts[2])
                fake.activations.append((version, body, dict(self.headers.items())))
                if fake.refusal is not None:
                    self._answer(fake.refusal[0], {"error": {"message": "no", "type": "x", "code": fake.refusal[1]}})
                    return
                fake.store.set_active(version)
                self._answer(200, {"version": version})

        def _answer(self, status: int, body: dict[str, Any]) -> None:
            payload = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield fake
    server.shutdown()
    server.server_close()
    thread.join()
