"""What a client may send and hold before its request is there: bounded, and one OpenAI-shaped error beyond that."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
import struct
from pathlib import Path
from typing import Any

import psutil
import pytest
from gateway_rig import GatewayRig, eventually, run, running
from yarl import URL

from server import connections

GET_HEALTH = b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n"


async def open_raw(rig: GatewayRig) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    url = URL(rig.public_url)
    return await asyncio.open_connection(url.host, url.port)


async def answer(reader: asyncio.StreamReader) -> tuple[int, Any]:
    """The status and the body of one whole answer."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = next(line for line in head.lower().split("\r\n") if line.startswith("content-length"))
    return int(head.split()[1]), json.loads(await reader.readexactly(int(length.split(":")[1])))


async def flood(writer: asyncio.StreamWriter, piece: bytes, num_bytes: int) -> None:
    """Send until it is all out or the other side has enough."""
    with contextlib.suppress(ConnectionError):
        for _ in range(num_bytes // len(piece)):
            writer.write(piece)
            await writer.drain()


@pytest.mark.parametrize("piece", [b"x" * 4096, b"X-Name: value\r\n" * 256], ids=["one_header", "many_headers"])
def test_a_head_without_end_takes_no_memory(tmp_path: Path, piece: bytes) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            _, writer = await open_raw(rig)
            before = psutil.Process().memory_info().rss
            writer.write(b"GET /health HTTP/1.1\r\nX: ")
            await flood(writer, piece, 64 << 20)
            assert psutil.Process().memory_info().rss - before < 16 << 20
            assert (await rig.request("GET", "/health")).status == 200

    run(scenario())


def test_a_head_that_is_too_long_is_told_so(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            reader, writer = await open_raw(rig)
            start = b"GET /health HTTP/1.1\r\nX: "
            writer.write(start + b"x" * (connections.MAX_HEAD_BYTES + 1 - len(start)))
            status, body = await answer(reader)
            assert (status, body["error"]["code"]) == (431, "headers_too_large")

    run(scenario())


def test_trailers_without_end_are_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            reader, writer = await open_raw(rig)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: ")
            before = psutil.Process().memory_info().rss
            await flood(writer, b"x" * 4096, 64 << 20)
            assert psutil.Process().memory_info().rss - before < 16 << 20
            with contextlib.suppress(ConnectionError):
                await reader.read()
            assert (await rig.request("GET", "/health")).status == 200

    run(scenario())


def test_a_large_body_behind_a_small_head_is_none_of_the_heads_business(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            reply = await rig.complete(prompt="x" * (4 * connections.MAX_HEAD_BYTES))
            assert reply.status == 200

    run(scenario())


@pytest.mark.parametrize("sent", [b"", b"\r\n", b"GET /health HT", GET_HEALTH + b"GET "])
def test_a_request_that_does_not_come_frees_its_connection(
    tmp_path: Path, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 0.7)

    async def scenario() -> None:
        async with running(tmp_path) as rig:
            reader, writer = await open_raw(rig)
            writer.write(sent)
            if sent.startswith(GET_HEALTH):
                assert (await answer(reader))[0] == 200
                writer.write(b"/health")
            status, body = await answer(reader)
            assert (status, body["error"]["code"]) == (408, "head_timeout")
            assert await reader.read() == b""

    run(scenario())


def test_requests_one_after_another_outlive_the_time_for_a_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 0.7)

    async def scenario() -> None:
        async with running(tmp_path) as rig:
            reader, writer = await open_raw(rig)
            for _ in range(3):
                writer.write(GET_HEALTH)
                assert (await answer(reader))[0] == 200
                await asyncio.sleep(0.9)

    run(scenario())


def test_connections_beyond_the_bound_are_told_so_and_the_operator_still_gets_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "max_connections", lambda: 3)

    async def scenario() -> None:
        async with running(tmp_path) as rig:
            held = [await open_raw(rig) for _ in range(3)]
            for reader, writer in held:
                writer.write(GET_HEALTH)
                assert (await answer(reader))[0] == 200
            reader, _ = await open_raw(rig)
            status, body = await answer(reader)
            assert (status, body["error"]["code"]) == (503, "too_many_connections")
            assert (await rig.admin("GET", "/admin/status")).status == 200
            held[0][1].close()

            async def is_served() -> bool:
                return (await rig.request("GET", "/health")).status == 200

            await eventually(is_served)

    run(scenario())


@pytest.mark.parametrize("sent", [b"\x16\x03\x01\x02\x00\r\n\r\n", b"GET /\xc3\xa9 HTTP/1.1\r\nHost: here\r\n\r\n"])
def test_what_is_no_request_gets_an_error_in_openais_shape(tmp_path: Path, sent: bytes) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            reader, writer = await open_raw(rig)
            writer.write(sent)
            status, body = await answer(reader)
            assert status == 400
            assert set(body["error"]) == {"message", "type", "param", "code"}

    run(scenario())


def num_data_packets(writer: asyncio.StreamWriter) -> int:
    """Received with data in them: `tcpi_data_segs_in` of linux/tcp.h."""
    info = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 160)
    return int(struct.unpack_from("I", info, 152)[0])


def test_a_head_and_what_follows_it_are_one_packet(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            reader, writer = await open_raw(rig)
            for number in (1, 2):
                writer.write(GET_HEALTH)
                assert (await answer(reader))[0] == 200
                assert num_data_packets(writer) == number

    run(scenario())


def test_a_head_without_a_body_comes_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            reader, writer = await open_raw(rig)
            writer.write(GET_HEALTH.replace(b"GET", b"HEAD"))
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            writer.write(GET_HEALTH)
            assert (await answer(reader))[0] == 200

    run(scenario())


def test_the_bound_leaves_descriptors_for_engines_and_the_operator() -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_files = 2 * connections.max_connections() + connections.max_connections()
    assert 0 < num_files + connections.RESERVED_FILES <= soft
