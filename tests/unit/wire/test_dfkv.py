"""DFKV through its C interface: values come back as they were put or not at all, and who does not answer is an empty one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import dfkv_rig
import msgspec
import pytest
from block_files import REALM, file_bytes, header, names_of

from wire.dfkv import DfkvClient, DfkvServers, DfkvSettings
from wire.errors import ConfigError, FrameError
from wire.kv_block_format import KvRealm, check
from wire.kv_dfkv import NUM_SLOTS, DfkvBlocks
from wire.kv_prefix import KvPrefix, decode_prefix, encode_prefix

NAMES = names_of(3)


@pytest.fixture(params=dfkv_rig.KINDS)
def dfkv(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dfkv_rig.Dfkv]:
    with dfkv_rig.running(request.param, tmp_path) as dfkv:
        yield dfkv


def prefix_of(realm: KvRealm = REALM, names: list[str] = NAMES) -> KvPrefix:
    return KvPrefix(model="tiny", **realm._asdict(), names=tuple(names), num_ranks=2, part_bytes=64)


def test_a_value_comes_back_byte_for_byte_until_it_is_removed(dfkv: dfkv_rig.Dfkv) -> None:
    client, value = dfkv.client(), bytes(range(256)) * 4097
    assert client.get("a/b", len(value)) is None
    client.put("a/b", value)
    assert client.get("a/b", len(value)) == client.get("a/b", 2 * len(value)) == value
    assert client.get("a/b", len(value) - 1) is None
    assert client.exist(["a/c", "a/b"]) == [False, True]
    client.remove(["a/b", "a/c"])
    assert client.exist(["a/b"]) == [False]


def test_a_key_is_written_once(dfkv: dfkv_rig.Dfkv) -> None:
    client = dfkv.client()
    client.put("key", b"old")
    client.put("key", b"new")
    assert client.get("key", 16) == b"old"
    client.remove(["key"])
    client.put("key", b"new")
    assert client.get("key", 16) == b"new"


def test_another_namespace_has_keys_of_its_own(dfkv: dfkv_rig.Dfkv) -> None:
    other = DfkvClient(dfkv.settings.model_copy(update={"namespace": "other"}))
    dfkv.client().put("key", b"ours")
    assert other.exist(["key"]) == [False]
    assert other.get("key", 16) is None
    other.put("key", b"theirs")
    assert dfkv.client().get("key", 16) == b"ours"


def test_who_is_gone_has_nothing_and_takes_nothing(dfkv: dfkv_rig.Dfkv) -> None:
    client, servers = dfkv.client(), DfkvServers(dfkv.settings)
    client.put("key", b"value")
    assert servers.silent() == []
    dfkv.kill()
    assert client.exist(["key"]) == [False]
    assert client.get("key", 16) is None
    with pytest.raises(ConnectionError, match="key"):
        client.put("key", b"value")
    with pytest.raises(ConnectionError, match="1 of 1"):
        client.remove(["key"])
    assert servers.silent() == [dfkv.settings.members]


@pytest.mark.parametrize("library", ["/absent/libdfkv.so", "libc.so.6"])
def test_what_is_no_dfkv_library_is_refused_with_what_to_do(library: str) -> None:
    settings = DfkvSettings(members="n1=127.0.0.1:1", library=library)
    with pytest.raises(ConfigError, match=r"github\.com/dingodb/dfkv"):
        DfkvClient(settings)


@pytest.mark.parametrize(
    "members",
    [
        "",
        "n1",
        "n1=localhost:9000",
        "n1=127.0.0.1",
        "n1=127.0.0.1:1,",
        "n1=::1:9000",
        "n1=127.0.0.256:1",
        "n1=127.0.0.1:0",
        "n1=127.0.0.1:65536",
    ],
)
def test_members_that_dfkv_would_silently_never_reach_are_refused(members: str) -> None:
    with pytest.raises(ConfigError, match=r"name=ip:port"):
        DfkvSettings.build({"members": members}, source="a test")


def test_a_name_that_two_servers_share_is_refused() -> None:
    with pytest.raises(ConfigError, match="'n1' names several DFKV servers"):
        DfkvSettings.build({"members": "n1=127.0.0.1:1,n2=127.0.0.1:2,n1=127.0.0.1:3"}, source="a test")


def test_a_block_is_there_with_all_its_parts_and_carries_its_identity(dfkv: dfkv_rig.Dfkv) -> None:
    blocks = DfkvBlocks(dfkv.client())
    block = header(NAMES, 1)
    data = file_bytes(block)
    with pytest.raises(FileNotFoundError):
        blocks.read(block, tensor_bytes=64)
    blocks.write(block, data)
    assert check(blocks.read(block, tensor_bytes=64)).name == NAMES[1]
    assert blocks.has_part(block)
    assert blocks.has(REALM, NAMES, 1) == [False, True, False]
    assert blocks.has(REALM, NAMES, 2) == [False, False, False]
    for other in (REALM._replace(tenant="other"), REALM._replace(target_version=1), REALM._replace(layout_hash="f" * 16)):
        assert blocks.has(other, NAMES, 1) == [False, False, False]
    blocks.remove_part(block)
    assert not blocks.has_part(block)


def test_a_prefix_is_found_by_its_name_in_every_realm(dfkv: dfkv_rig.Dfkv) -> None:
    blocks = DfkvBlocks(dfkv.client())
    realms = [REALM, REALM._replace(tenant="other"), REALM._replace(target_version=1)]
    for realm in [*realms, *realms]:
        blocks.note(prefix_of(realm))
    assert [prefix.realm for prefix in blocks.prefixes(NAMES[-1])] == realms
    assert blocks.prefixes(NAMES[0]) == []
    blocks.remove(prefix_of(realms[0]))
    assert [prefix.realm for prefix in blocks.prefixes(NAMES[-1])] == realms[1:]
    blocks.note(prefix_of())
    assert len(blocks.prefixes(NAMES[-1])) == 3


def test_realms_beyond_the_slots_of_a_name_are_left_out(dfkv: dfkv_rig.Dfkv) -> None:
    blocks = DfkvBlocks(dfkv.client())
    for version in range(NUM_SLOTS + 2):
        blocks.note(prefix_of(REALM._replace(target_version=version)))
    assert [prefix.target_version for prefix in blocks.prefixes(NAMES[-1])] == list(range(NUM_SLOTS))


def test_removing_a_prefix_removes_every_part_of_its_blocks(dfkv: dfkv_rig.Dfkv) -> None:
    blocks = DfkvBlocks(dfkv.client())
    for position in range(3):
        for rank in range(2):
            blocks.write(msgspec.structs.replace(header(NAMES, position), rank=rank), b"part")
    assert blocks.has(REALM, NAMES, 2) == [True] * 3
    blocks.remove(prefix_of())
    assert blocks.has(REALM, NAMES, 1) == [False] * 3


def test_a_damaged_note_is_none_and_is_replaced(dfkv: dfkv_rig.Dfkv) -> None:
    client = dfkv.client()
    data = encode_prefix(prefix_of())
    client.put(f"prefix/{NAMES[-1]}.0", data[:-1] + bytes([data[-1] ^ 1]))
    blocks = DfkvBlocks(client)
    assert blocks.prefixes(NAMES[-1]) == []
    blocks.note(prefix_of())
    assert blocks.prefixes(NAMES[-1]) == [prefix_of()]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "checksum"),
        (encode_prefix(prefix_of())[:-1], "checksum"),
        (encode_prefix(prefix_of(names=NAMES[:2])), "another"),
        (encode_prefix(prefix_of(names=[])), "another"),
    ],
)
def test_what_is_not_the_prefix_asked_for_is_refused(data: bytes, why: str) -> None:
    assert decode_prefix(encode_prefix(prefix_of()), NAMES[-1]) == prefix_of()
    with pytest.raises(FrameError, match=why):
        decode_prefix(data, NAMES[-1])
