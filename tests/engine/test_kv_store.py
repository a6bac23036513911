"""The KV store in live engines: a follow-up turn after a restart is not prefilled again, and no fault changes a token."""

from __future__ import annotations

import inspect
import json
import os
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import dfkv_rig
import pytest
import tiny
from conftest import make_drafts
from live_engine import Completion, LiveEngine, start_engine
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from waiting import DEADLINE_S, wait_until

from launch import host
from launch.config import PoolSettings, SystemConfig
from launch.engine_command import kv_transfer_env, nixl_connector, store_connector
from server.engine.kv_store_connector import PacelineKvStore
from server.state.dfkv import DfkvState
from wire.dfkv import DfkvServers, DfkvSettings
from wire.kv_blocks import prompt_chain
from wire.kv_files import KvDirectory

BLOCK_TOKENS = 32
FIRST_TURN = "user: what is left of this conversation once the engine that computed it is gone? assistant: "
NEXT_TURN = " user: and what of it has the next engine to compute again? assistant: "
CONVERSATIONS = ("alone", "beside_nixl", "kept", "altered", "truncated", "lost", "updated")
HITS = "vllm:external_prefix_cache_hits_total"
MAX_BYTES = 1 << 30


def store_config(state_dir: Path, dfkv: DfkvSettings | None) -> dict[str, Any]:
    settings = [f"state.dir={state_dir}", "kv_store.enabled=true", f"kv_store.max_bytes={MAX_BYTES}"]
    if dfkv is not None:
        settings += [f"kv_store.dfkv.{key}={value}" for key, value in dfkv.model_dump().items()]
    return store_connector(SystemConfig.load([], settings))


def beside_nixl(nixl: dict[str, Any], store: dict[str, Any]) -> dict[str, Any]:
    """Pulls come first, then the store."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": nixl["kv_role"],
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [nixl, store]},
    }


@contextmanager
def engine_with_store(
    target_dir: Path,
    state_dir: Path,
    engine_id: str,
    *,
    core: int,
    pool: PoolSettings | None = None,
    dfkv: DfkvSettings | None = None,
) -> Iterator[LiveEngine]:
    """In a pool the engine has NIXL besides. The store is DFKV where it is given, else files."""
    config, variables = store_config(state_dir, dfkv), {"PROBE_DFKV_ANSWER_S": str(DEADLINE_S)}
    if pool is not None:
        facts = host.gather()
        config, variables = beside_nixl(nixl_connector(pool, facts), config), variables | kv_transfer_env(pool, facts)
    with start_engine(
        target_dir,
        state_dir,
        tiny.DRAFT_VOCAB,
        options=["--max-num-seqs", "8", "--kv-transfer-config", json.dumps(config)],
        worker_cls="probe_worker.ProbeCpuWorker",
        engine_id=engine_id,
        core=core,
        variables=variables,
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def state_dir(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    state_dir = tmp_path_factory.mktemp("store-state")
    make_drafts(state_dir, tiny_target, draft_vocab_size=tiny.DRAFT_VOCAB, count=1)
    return state_dir


class Conversation:
    """A first turn that one engine answered, its follow-up, and what an engine without KV of it makes of that."""

    def __init__(self, engine: LiveEngine, salt: str) -> None:
        first = engine.complete(FIRST_TURN + salt, cache_salt=salt, max_tokens=64)
        self.salt = salt
        self.num_stored_blocks = (len(first.ids) - 1) // BLOCK_TOKENS  # the last token was never computed
        self.prompt = first.ids + engine.complete(NEXT_TURN, max_tokens=1).prompt_ids
        self.reference = engine.complete(self.prompt, cache_salt=f"{salt}-reference", max_tokens=64)

    def block_files(self, state_dir: Path) -> list[Path]:
        directory = KvDirectory(state_dir / "kv")
        (realm,) = [realm for realm in directory.realms() if (realm.target_version, realm.tenant) == (0, "default")]
        names = prompt_chain(self.prompt, BLOCK_TOKENS, self.salt)[: self.num_stored_blocks]
        return [directory.block_path(realm, name.hex(), 0) for name in names]


class Engines(NamedTuple):
    """Two that share the directory, started after the one that filled it has ended."""

    alone: LiveEngine
    beside_nixl: LiveEngine


@pytest.fixture(scope="module")
def conversations(tiny_target: Path, state_dir: Path) -> dict[str, Conversation]:
    """By salt; the engine that computed them is gone."""
    with engine_with_store(tiny_target, state_dir, "store-0", core=min(os.sched_getaffinity(0))) as engine:
        conversations = {salt: Conversation(engine, salt) for salt in CONVERSATIONS}
    for conversation in conversations.values():
        assert all(path.exists() for path in conversation.block_files(state_dir))
    return conversations


@pytest.fixture(scope="module")
def engines(tiny_target: Path, state_dir: Path, conversations: dict[str, Conversation]) -> Iterator[Engines]:
    pools = "pool=[{id='prefill-0', kind='prefill', port=0}, {id='decode-0', kind='decode', port=0}]"
    config = host.with_ports(SystemConfig.load([], [pools, "gateway.port=0", "gateway.admin_port=0"]))
    cores = sorted(os.sched_getaffinity(0))

    def start(engine_id: str, pool: PoolSettings | None, core: int) -> LiveEngine:
        return stack.enter_context(engine_with_store(tiny_target, state_dir, engine_id, core=core, pool=pool))

    with ExitStack() as stack, ThreadPoolExecutor(2) as threads:
        yield Engines(*threads.map(start, ("store-1", "store-2"), (None, config.pool[1]), (cores[0], cores[-1])))


def count(engine: LiveEngine, event: str) -> float:
    """Blocks of the store by what became of them; what a step counts is told at the next one, and read after one more."""
    for _ in range(3):
        engine.complete("tell", max_tokens=1)
    with urllib.request.urlopen(engine.url + "/metrics", timeout=DEADLINE_S) as response:
        lines = response.read().decode().splitlines()
    (line,) = [line for line in lines if line.startswith("paceline_kv_store_blocks_total{") and f'event="{event}"' in line]
    return float(line.rsplit(" ", 1)[1])


def accepted(completion: Completion) -> list[int]:
    """Proposals accepted, by verify step."""
    return list(completion.metrics["speculative_decoding"]["per_step_accepted"])


def follow_up(engine: LiveEngine, conversation: Conversation, **options: object) -> tuple[Completion, float]:
    """The answer, and how many prompt tokens came out of the store."""
    hits = engine.metric(HITS)
    completion = engine.complete(conversation.prompt, **{"cache_salt": conversation.salt, "max_tokens": 64} | options)
    return completion, engine.metric(HITS) - hits


def test_vllm_calls_a_connector_as_ours_expects() -> None:
    """Every call we answer is one of the base class, with the same parameters."""
    for name, ours in vars(PacelineKvStore).items():
        theirs = getattr(KVConnectorBase_V1, name, None) or getattr(SupportsHMA, name, None)
        if inspect.isfunction(ours):
            assert theirs is not None, name
            assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters), name


@pytest.mark.parametrize("kind", ["alone", "beside_nixl"])
def test_a_follow_up_turn_after_a_restart_is_not_prefilled_again(
    engines: Engines, conversations: dict[str, Conversation], kind: str
) -> None:
    engine: LiveEngine = getattr(engines, kind)
    kept = conversations[kind]
    assert kept.num_stored_blocks >= 4
    completion, num_hits = follow_up(engine, kept)
    # A speculating engine computes the last matching block again, from its own prefix cache as well.
    assert num_hits == (kept.num_stored_blocks - 1) * BLOCK_TOKENS
    assert completion.token_ids == kept.reference.token_ids
    assert accepted(completion) == accepted(kept.reference)  # the draft's KV came along
    wait_until(lambda: count(engine, "loaded") == kept.num_stored_blocks - 1, "for the loaded blocks to be counted")


def test_another_salt_and_another_tenant_get_nothing(engines: Engines, conversations: dict[str, Conversation]) -> None:
    engine = engines.alone
    kept = conversations["kept"]
    completion, num_hits = follow_up(engine, kept, cache_salt="another")
    assert (completion.token_ids, num_hits) == (kept.reference.token_ids, 0)
    completion, num_hits = follow_up(engine, conversations["lost"], vllm_xargs={"paceline_tenant": "another"})
    assert (completion.token_ids, num_hits) == (conversations["lost"].reference.token_ids, 0)


@pytest.mark.parametrize("fault", ["altered", "truncated", "lost"])
def test_a_damaged_block_costs_time_and_no_token(
    engines: Engines, conversations: dict[str, Conversation], state_dir: Path, fault: str
) -> None:
    engine = engines.beside_nixl
    damaged = conversations[fault]
    path = damaged.block_files(state_dir)[1]
    data = path.read_bytes()
    if fault == "altered":
        middle = len(data) // 2
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    elif fault == "truncated":
        path.write_bytes(data[: len(data) // 2])
    else:
        path.unlink()
    corrupt = count(engine, "corrupt")
    completion, _ = follow_up(engine, damaged)
    assert completion.token_ids == damaged.reference.token_ids
    wait_until(lambda: path.exists() and path.read_bytes() == data, "for the block to be computed anew and stored again")
    assert count(engine, "corrupt") - corrupt == (fault != "lost")


def test_kv_of_another_target_is_never_used(
    engines: Engines, conversations: dict[str, Conversation], state_dir: Path, tmp_path: Path
) -> None:
    """Neither that of an older version after an update, nor under the new version what the old one computed."""
    engine = engines.alone
    updated = conversations["updated"]
    other_dir = tiny.make_target(tmp_path / "other", seed=1)
    engine.complete(updated.prompt, cache_salt="straddling", max_tokens=1)
    engine.rpc("probe_update_target", 1, str(other_dir))
    assert engine.ok("/paceline/status")["workers"][0]["target_version"] == 1
    completion, _ = follow_up(engine, updated)  # promised before the scheduler has heard of the update
    fresh = engine.complete(updated.prompt, cache_salt="fresh", max_tokens=64)
    assert completion.token_ids == fresh.token_ids != updated.reference.token_ids
    engine.complete([*updated.prompt, *completion.token_ids], cache_salt="straddling", max_tokens=64)
    wait_until(lambda: count(engine, "lost") > 0, "for the promised blocks to be counted as lost")
    wait_until(lambda: count(engine, "dropped_mixed") > 0, "for the straddling blocks to be dropped")
    directory = KvDirectory(state_dir / "kv")
    wait_until(lambda: any(realm.target_version == 1 for realm in directory.realms()), "for blocks of the new target")
    (realm,) = [realm for realm in directory.realms() if realm.target_version == 1]
    straddling = {name.hex() for name in prompt_chain([*updated.prompt, *completion.token_ids], BLOCK_TOKENS, "straddling")}
    assert straddling.isdisjoint(header.name for header in directory.headers(realm))
    wait_until(lambda: directory.headers(realm), "for whole blocks of the new target")


@pytest.mark.parametrize("kind", dfkv_rig.KINDS)
def test_another_engine_goes_on_from_dfkv_and_serves_on_without_it(
    tiny_target: Path, state_dir: Path, tmp_path: Path, kind: str
) -> None:
    core = min(os.sched_getaffinity(0))
    with dfkv_rig.running(kind, tmp_path) as dfkv:
        with engine_with_store(tiny_target, state_dir, f"{kind}-0", core=core, dfkv=dfkv.settings) as engine:
            kept, gone = Conversation(engine, "dfkv"), Conversation(engine, "gone")
        name = prompt_chain(kept.prompt, BLOCK_TOKENS, kept.salt)[kept.num_stored_blocks - 1].hex()
        (located,) = DfkvState(dfkv.client(), DfkvServers(dfkv.settings)).locate(name)
        assert (len(located.block_hashes), located.tenant) == (kept.num_stored_blocks, "default")
        with engine_with_store(tiny_target, state_dir, f"{kind}-1", core=core, dfkv=dfkv.settings) as engine:
            completion, num_hits = follow_up(engine, kept)
            assert num_hits == (kept.num_stored_blocks - 1) * BLOCK_TOKENS
            assert completion.token_ids == kept.reference.token_ids
            assert accepted(completion) == accepted(kept.reference)
            dfkv.kill()
            completion, num_hits = follow_up(engine, gone)
            assert (completion.token_ids, num_hits) == (gone.reference.token_ids, 0)
            wait_until(lambda: count(engine, "dropped_disk_error") > 0, "for what DFKV did not take to be counted")
