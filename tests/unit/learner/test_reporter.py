from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from sample_messages import learner_report
from waiting import wait_until

from learner.admin import AdminClient
from learner.reporter import Reporter
from wire.control import ActivateRequest, LearnerReport

ORDERS = b'{"paused": true, "active_version": 3}'
GOOD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(ORDERS), ORDERS)
CUT_SHORT = b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n{"
NOT_HTTP = b"220 mail.example ESMTP\r\n"
CUT_SHORT_REFUSAL = b"HTTP/1.1 409 Conflict\r\nContent-Length: 900\r\n\r\n{"


@pytest.fixture
def serve() -> Iterator[Callable[[list[bytes]], str]]:
    """A port that answers one connection after another with these bytes, the last of them from then on."""
    servers: list[socket.socket] = []

    def start(answers: list[bytes]) -> str:
        server = socket.create_server(("127.0.0.1", 0))
        servers.append(server)

        def run() -> None:
            left = list(answers)
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with closing(connection):
                    connection.recv(65536)
                    connection.sendall(left.pop(0) if len(left) > 1 else left[0])

        threading.Thread(target=run, daemon=True).start()
        return f"http://127.0.0.1:{server.getsockname()[1]}"

    yield start
    for server in servers:
        server.shutdown(socket.SHUT_RDWR)
        server.close()


@pytest.fixture
def report() -> LearnerReport:
    return learner_report()


@pytest.mark.parametrize("broken", [CUT_SHORT, NOT_HTTP], ids=["cut short", "not HTTP"])
def test_an_answer_that_breaks_off_is_no_answer(serve, report, broken):
    client = AdminClient(serve([broken]))
    assert client.report(report) is None
    answer = client.activate(1, ActivateRequest(expected_active=0), idempotency_key="k")
    assert answer.code == "unreachable"


def test_a_refusal_that_breaks_off_is_a_refusal(serve):
    answer = AdminClient(serve([CUT_SHORT_REFUSAL])).activate(1, ActivateRequest(expected_active=0), idempotency_key="k")
    assert (answer.code, answer.is_ok) == ("409", False)


def test_a_report_that_cannot_be_made_ends_no_reports(serve, report, monkeypatch):
    monkeypatch.setattr("learner.reporter._INTERVAL_S", 0.01)
    failures = [RuntimeError("read while it changed")]

    def make() -> LearnerReport:
        if failures:
            raise failures.pop()
        return report

    reporter = Reporter(AdminClient(serve([GOOD])), make)
    wait_until(lambda: reporter.is_connected)
    assert not failures
    assert reporter.orders is not None
    assert reporter.orders.active_version == 3
    reporter.close()


def test_reports_go_on_after_a_broken_answer(serve, report, monkeypatch):
    monkeypatch.setattr("learner.reporter._INTERVAL_S", 0.01)
    reporter = Reporter(AdminClient(serve([CUT_SHORT, NOT_HTTP, GOOD])), lambda: report)
    wait_until(lambda: reporter.is_connected)
    reporter.close()
