"""DfkvClient: values by key in DFKV, a distributed cache of KV values, through its C interface.

The contract is `src/client/dfkv_c_api.h` of github.com/dingodb/dfkv at v1.39.0. Of it only what every value needs is used:
open, put, get_auto, batch_exist, batch_remove and version. A key is written once: a put of a key that is there keeps the
old value and says it is done. Servers drop what has not been used for long, do not replicate, and know no tenants and no
passwords, so whoever reaches them reads everything: they belong on a network of their own.

A server that does not answer costs a call up to 3 s to connect and 10 s for each of two attempts, and then nothing for a
growing while, in which its keys are absent. Only `put` and `remove` tell that from a key that is absent.
"""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_int, c_uint32, c_uint64, c_void_p
from hashlib import blake2b
from ipaddress import AddressValueError, IPv4Address

from pydantic import field_validator

from wire.config import Config
from wire.errors import ConfigError

_MEMBER = re.compile(r"(?P<name>[^=,\s]+)=(?P<address>[\d.]+):(?P<port>\d{1,5})", re.ASCII)
_MAX_PORT = 65535
_FUNCTIONS = {
    "dfkv_version": (c_char_p, ()),
    "dfkv_open": (c_void_p, (c_char_p, c_uint64, *(c_uint32,) * 8)),
    "dfkv_put": (c_int, (c_void_p, c_char_p, c_char_p, c_uint64)),
    "dfkv_get_auto": (c_int, (c_void_p, c_char_p, c_void_p, c_uint64, POINTER(c_uint64))),
    "dfkv_batch_exist": (c_int, (c_void_p, POINTER(c_char_p), c_int, POINTER(c_int))),
    "dfkv_batch_remove": (c_int, (c_void_p, POINTER(c_char_p), c_int, POINTER(c_int))),
}
"""By name: what it returns, and its arguments."""
_GEOMETRY = (0,) * 8
"""DFKV compares the sizes of a cache for its callers; our values tell what they are themselves."""
_PING_KEY = "ping"
"""Never written: who confirms its removal is there."""


class DfkvSettings(Config):
    """`[kv_store.dfkv]`: servers of github.com/dingodb/dfkv. They ask for no password and belong on a network of their own."""

    members: str
    """`name=ip:port,name=ip:port`, the same everywhere: names decide which key is where. DFKV resolves no host names."""
    library: str = "libdfkv.so"
    """As the dynamic loader takes it: an absolute path, or a name it finds."""
    namespace: str = "paceline"
    """Systems with the same one share KV, so a version of their targets has to mean the same weights in all of them."""

    @field_validator("members")
    @classmethod
    def _are_members(cls, members: str) -> str:
        num_of_name = Counter(_member_name(member) for member in members.split(","))
        twice = [name for name, count in num_of_name.items() if count > 1]
        if twice:
            raise ValueError(f"{twice[0]!r} names several DFKV servers; names decide which key is where, give each its own")
        return members


def _member_name(member: str) -> str:
    """The name of one server; raises ValueError where it is not told as DFKV takes it."""
    found = _MEMBER.fullmatch(member)
    if not found or not _is_ipv4(found["address"]) or not 0 < int(found["port"]) <= _MAX_PORT:
        raise ValueError(f"give each DFKV server as name=ip:port with an IPv4 address, by commas, not as {member!r}")
    return found["name"]


def _is_ipv4(text: str) -> bool:
    try:
        IPv4Address(text)
    except AddressValueError:
        return False
    return True


def load_library(path: str) -> ctypes.CDLL:
    """`libdfkv.so` at a path, or by a name the dynamic loader finds; raises ConfigError."""
    try:
        library = ctypes.CDLL(path)
        for name, (returned, arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = returned, arguments
    except (OSError, AttributeError) as error:
        raise ConfigError(
            f"kv_store.dfkv.library {path!r} is not a DFKV library: {error}; build github.com/dingodb/dfkv (cmake "
            "-DDFKV_BUILD_TESTS=OFF) and give the path of its libdfkv.so, or take [kv_store.dfkv] out to keep KV in files"
        ) from None
    return library


class DfkvClient:
    """One client of a set of servers, for any number of threads; raises ConfigError where it cannot be made.

    It stays open as long as its process: a call that hangs in a thread cannot be ended, and closing under it would crash.
    """

    def __init__(self, settings: DfkvSettings) -> None:
        self._library = load_library(settings.library)
        self.version: str = self._library.dfkv_version().decode()
        self.members = settings.members
        # DFKV mixes this number, which it calls the model's hash, into every key; 0 would mean no namespace.
        number = int.from_bytes(blake2b(settings.namespace.encode(), digest_size=8).digest()) or 1
        self._handle = self._library.dfkv_open(self.members.encode(), number, *_GEOMETRY)
        if not self._handle:
            raise ConfigError(f"DFKV {self.version} cannot open a client of {self.members}; what it wrote to stderr tells why")

    def put(self, key: str, value: bytes) -> None:
        """Returns once a server has the key, with this value or an older one; raises ConnectionError where none took it."""
        if self._library.dfkv_put(self._handle, key.encode(), value, len(value)) != 0:
            raise ConnectionError(f"no DFKV server took {key}: it is not reachable, or full, or refuses {len(value)} bytes")

    def get(self, key: str, max_bytes: int) -> bytes | None:
        """None where the key is absent, its value larger, or its server does not answer."""
        buffer, num_bytes = bytearray(max_bytes), c_uint64()
        target = (ctypes.c_char * max_bytes).from_buffer(buffer)
        if self._library.dfkv_get_auto(self._handle, key.encode(), target, max_bytes, num_bytes) != 1:
            return None
        return bytes(memoryview(buffer)[: num_bytes.value])

    def exist(self, keys: Sequence[str]) -> list[bool]:
        """By key; False also where its server does not answer."""
        answers = (c_int * len(keys))()
        self._library.dfkv_batch_exist(self._handle, _strings(keys), len(keys), answers)
        return [answer == 1 for answer in answers]

    def remove(self, keys: Sequence[str]) -> None:
        """Tries all; raises ConnectionError unless every server confirms that its keys are gone or never were."""
        answers = (c_int * len(keys))()
        self._library.dfkv_batch_remove(self._handle, _strings(keys), len(keys), answers)
        failed = [key for key, answer in zip(keys, answers, strict=True) if answer != 1]
        if failed:
            raise ConnectionError(f"DFKV did not confirm that {len(failed)} of {len(keys)} keys are gone, {failed[0]} first")


class DfkvServers:
    """Each server by itself, to ask whether it is there."""

    def __init__(self, settings: DfkvSettings) -> None:
        members = settings.members.split(",")
        self._clients = [DfkvClient(settings.model_copy(update={"members": member})) for member in members]
        self.version = self._clients[0].version

    def silent(self) -> list[str]:
        """Members that do not answer now. One that comes back may be taken for silent half a minute longer."""
        return [client.members for client in self._clients if not _is_there(client)]


def _is_there(client: DfkvClient) -> bool:
    try:
        client.remove([_PING_KEY])
    except ConnectionError:
        return False
    return True


def _strings(keys: Sequence[str]) -> ctypes.Array[c_char_p]:
    return (c_char_p * len(keys))(*(key.encode() for key in keys))
