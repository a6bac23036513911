"""Ports that are bound some time after they were chosen."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from wire import ports
from wire.ports import free_ports


def test_chosen_ports_are_free_and_differ() -> None:
    chosen = free_ports(50)
    assert len(set(chosen)) == 50
    for port in chosen:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))


def test_no_outgoing_connection_can_take_a_chosen_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ip_local_port_range"
    path.write_text("20000\t60999\n")
    monkeypatch.setattr(ports, "_RANGE_FILE", path)
    assert all(10_000 <= port < 20_000 for port in free_ports(50))


def test_a_port_that_is_taken_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_LEAST_ROOM", 2)
    monkeypatch.setattr(ports, "_RANGE_FILE", tmp_path / "ip_local_port_range")
    first, second = free_ports(2)
    monkeypatch.setattr(ports, "_candidates", lambda: iter([first, second]))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first))
        assert free_ports(1) == [second]


@pytest.mark.parametrize("text", ["1024 65535", "10100 60999", "", "no numbers"])
def test_where_connections_leave_no_room_the_kernel_chooses(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ip_local_port_range"
    path.write_text(text)
    monkeypatch.setattr(ports, "_RANGE_FILE", path)
    assert len(set(free_ports(20))) == 20
