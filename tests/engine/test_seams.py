"""Contract with the installed vLLM: every name, field and signature SEAMS.md lists. Run these first after a version bump."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import vllm

import server.engine
from server.engine import mends, pin, requests, runner_v1, runner_v2
from server.engine.depth import UTILITY
from server.engine.draft_backlog import DraftBacklog
from server.engine.plugin import WEIGHT_BACKEND, register
from server.generate import MIN_TEMPERATURE, GenerateSampling

VLLM = Path(vllm.__file__).parent
SEAMS = (Path(server.engine.__file__).parent / "SEAMS.md").read_text()


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_the_installed_release_is_the_pinned_one() -> None:
    assert pin.require_pinned_vllm().startswith(pin.VLLM_VERSION)


def test_another_release_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pin, "version", lambda _: "0.33.0")
    with pytest.raises(pin.ConfigError, match=r"0\.33\.0 is installed.*0\.32\.0 only"):
        pin.require_pinned_vllm()


def test_v1_runner_keeps_the_fields_the_adapter_reads() -> None:
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
    from vllm.v1.worker.gpu_model_runner import ExecuteModelState, GPUModelRunner

    assert {"scheduler_output", "spec_decode_metadata", "hidden_states", "aux_hidden_states"} <= set(ExecuteModelState._fields)
    assert {"draft_token_ids", "num_draft_tokens"} <= {field.name for field in dataclasses.fields(SpecDecodeMetadata)}
    assert parameters(GPUModelRunner.sample_tokens) == ["self", "grammar_output"]
    assert parameters(GPUModelRunner.execute_model)[:2] == ["self", "scheduler_output"]
    source = inspect.getsource(GPUModelRunner)
    for attribute in ("self.execute_model_state", "self.discard_request_mask", "self.input_ids", "self.input_batch"):
        assert attribute in source, attribute
    assert runner_v1.NAME == "v1"


def test_v2_runner_keeps_the_fields_the_adapter_reads() -> None:
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import ExecuteModelState, GPUModelRunner

    assert {"input_batch", "hidden_states", "aux_hidden_states"} <= set(ExecuteModelState._fields)
    needed = {
        "req_ids",
        "num_reqs",
        "query_start_loc_np",
        "num_draft_tokens_per_req",
        "positions",
        "query_start_loc",
        "input_ids",
    }
    assert needed <= {field.name for field in dataclasses.fields(InputBatch)}
    assert parameters(GPUModelRunner.sample_tokens) == ["self", "grammar_output"]
    assert parameters(GPUModelRunner.execute_model)[:2] == ["self", "scheduler_output"]
    assert runner_v2.NAME == "v2"


def test_async_outputs_have_the_one_method_we_wrap() -> None:
    from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

    assert AsyncModelRunnerOutput.__abstractmethods__ == frozenset({"get_output"})
    assert "sampled_token_ids" in {field.name for field in dataclasses.fields(ModelRunnerOutput)}


def test_scheduler_output_names_new_and_finished_requests() -> None:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

    needed = {"scheduled_new_reqs", "finished_req_ids", "num_scheduled_tokens", "total_num_scheduled_tokens"}
    needed |= {"scheduled_spec_decode_tokens", "num_spec_tokens_to_schedule"}
    assert needed <= {field.name for field in dataclasses.fields(SchedulerOutput)}
    assert {"req_id", "sampling_params", "prompt_token_ids"} <= {field.name for field in dataclasses.fields(NewRequestData)}
    assert {"temperature", "extra_args"} <= set(SamplingParams.__struct_fields__)


def test_the_engine_still_appends_eight_hex_digits_to_request_ids() -> None:
    from vllm.v1.engine.input_processor import InputProcessor

    source = inspect.getsource(InputProcessor.assign_request_id)
    assert 'f"{request.external_req_id}-{random_uuid():.8}"' in source
    assert requests._RANDOM_SUFFIX.sub("", "cmpl-abc-0-1a2b3c4d") == "cmpl-abc-0"


def test_the_weight_transfer_base_class_is_the_one_we_extend() -> None:
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.distributed.weight_transfer.base import WeightTransferEngine

    assert WeightTransferEngine.__abstractmethods__ == frozenset(
        {"init_transfer_engine", "start_weight_update", "receive_weights", "finish_weight_update", "shutdown"}
    )
    assert parameters(WeightTransferEngine.__init__) == ["self", "config", "vllm_config", "device", "model"]
    assert "self._default_model = model" in inspect.getsource(WeightTransferEngine.__init__)
    register()
    register()
    assert WEIGHT_BACKEND in WeightTransferEngineFactory._registry


def test_the_engine_client_pauses_labels_and_resumes_as_we_ask() -> None:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core import EngineCore

    assert parameters(AsyncLLM.pause_generation) == ["self", "mode", "clear_cache"]
    assert parameters(AsyncLLM.resume_generation) == ["self"]
    assert parameters(AsyncLLM.update_weight_version) == ["self", "new_version"]
    assert "self._reset_caches()" in inspect.getsource(EngineCore._finish_pause)
    defaults = inspect.signature(EngineCore._reset_caches).parameters
    assert (defaults["reset_running_requests"].default, defaults["reset_connector"].default) == (True, True)


def test_the_settings_rollouts_depend_on_are_where_we_read_them() -> None:
    from vllm.config import ModelConfig, SchedulerConfig, SpeculativeConfig
    from vllm.entrypoints.launchers.cli_args import FrontendArgs
    from vllm.sampling_params import _MAX_TEMP, SamplingParams

    assert _MAX_TEMP == MIN_TEMPERATURE
    assert {"logprobs_mode", "return_sampling_mask"} <= set(ModelConfig.__dataclass_fields__)
    assert "policy" in SchedulerConfig.__dataclass_fields__
    assert "rejection_sample_method" in SpeculativeConfig.__dataclass_fields__
    assert {"enable_scale_out", "tokens_only"} <= set(FrontendArgs.__dataclass_fields__)
    ours = {field.name for field in msgspec.structs.fields(GenerateSampling)}
    assert ours | {"detokenize", "extra_args"} <= set(SamplingParams.__struct_fields__)


def test_workers_have_the_update_calls_we_make_in_one_rpc() -> None:
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    for worker in (Worker, CPUWorker):
        assert parameters(worker.load_model) == ["self", "load_dummy_weights"]
        for method in (
            "start_draft_weight_update",
            "start_weight_update",
            "finish_weight_update",
            "get_model",
            "get_draft_model",
        ):
            assert parameters(getattr(worker, method)) == ["self"], method
        assert parameters(worker.update_weights) == ["self", "update_info"]


def test_the_layerwise_reload_has_the_two_calls_we_make() -> None:
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    assert parameters(initialize_layerwise_reload) == ["model"]
    assert callable(finalize_layerwise_reload)


def test_the_scheduler_keeps_its_depth_table_where_we_write() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.core_client import AsyncMPClient

    source = inspect.getsource(Scheduler)
    assert "self.dynamic_sd_lookup: list[int] | None" in source
    assert "num_spec_tokens_to_schedule = self.dynamic_sd_lookup[" in source
    assert "self.scheduler" in inspect.getsource(EngineCore)
    assert parameters(AsyncMPClient.call_utility_async) == ["self", "method", "args"]
    register()
    assert hasattr(EngineCore, UTILITY)


def test_the_draft_runs_at_depth_zero_as_the_backlog_puts_it_off() -> None:
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    assert parameters(GPUModelRunner.propose_draft_token_ids) == parameters(DraftBacklog._shadow_propose)
    assert "self.propose_draft_token_ids(" in inspect.getsource(GPUModelRunner.sample_tokens)
    passed = {
        "num_speculative_tokens",
        "target_token_ids",
        "target_positions",
        "target_hidden_states",
        "next_token_ids",
        "token_indices_to_sample",
        "common_attn_metadata",
        "sampling_metadata",
    }
    taken = inspect.signature(SpecDecodeBaseProposer.propose).parameters
    assert passed <= set(taken)
    required = {name for name, parameter in taken.items() if parameter.default is inspect.Parameter.empty}
    assert required - passed == {"self"}
    source = inspect.getsource(SpecDecodeBaseProposer.propose)
    assert "if self.num_speculative_tokens == 0:" in source
    inputs = inspect.getsource(SpecDecodeBaseProposer.set_inputs_first_pass)
    assert "self.input_ids[: num_tokens - 1] = target_token_ids[1:]" in inputs
    assert "self.input_ids[token_indices_to_sample] = next_token_ids" in inputs
    replaced = {
        "query_start_loc",
        "query_start_loc_cpu",
        "seq_lens",
        "num_actual_tokens",
        "max_query_len",
        "slot_mapping",
        "positions",
    }
    assert replaced <= {field.name for field in dataclasses.fields(CommonAttentionMetadata)}
    runner = inspect.getsource(GPUModelRunner)
    for attribute in ("self.use_async_scheduling", "self.use_aux_hidden_state_outputs", "self.positions", "self.uses_mrope"):
        assert attribute in runner, attribute
    drafter = inspect.getsource(SpecDecodeBaseProposer)
    for attribute in ("self.needs_extra_input_slots", "self.uses_mrope", "self.max_num_tokens"):
        assert attribute in drafter, attribute


@pytest.mark.parametrize(
    ("changes", "is_put_off"),
    [
        ({}, True),
        ({"device": torch.device("cuda")}, False),
        ({"use_async_scheduling": True}, False),
        ({"use_aux_hidden_state_outputs": False}, False),
        ({"uses_mrope": True}, False),
        ({"speculative_config": None}, False),
        ({"speculative_config": SimpleNamespace(method="eagle", disable_padded_drafter_batch=False)}, False),
        ({"speculative_config": SimpleNamespace(method="eagle3", disable_padded_drafter_batch=True)}, False),
        ({"drafter": SimpleNamespace(needs_extra_input_slots=True, uses_mrope=False)}, False),
        ({"drafter": SimpleNamespace(needs_extra_input_slots=False, uses_mrope=True)}, False),
        ({"parallel_config": SimpleNamespace(data_parallel_size=2)}, False),
    ],
)
def test_the_draft_is_put_off_on_the_runner_it_was_written_for_only(changes: dict[str, Any], is_put_off: bool) -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    runner = GPUModelRunner.__new__(GPUModelRunner)
    vars(runner).update(
        device=torch.device("cpu"),
        speculative_config=SimpleNamespace(method="eagle3", disable_padded_drafter_batch=False),
        use_aux_hidden_state_outputs=True,
        use_async_scheduling=False,
        uses_mrope=False,
        drafter=SimpleNamespace(needs_extra_input_slots=False, uses_mrope=False),
        parallel_config=SimpleNamespace(data_parallel_size=1),
    )
    vars(runner).update(changes)
    assert DraftBacklog.suits(runner) is is_put_off


def test_the_core_asks_for_proposals_where_its_flag_says_so() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    source = inspect.getsource(EngineCore.post_step)
    assert "if self.check_for_draft_tokens and not self.async_scheduling" in source
    assert "self.scheduler.schedule(" in inspect.getsource(EngineCore.step)
    source = inspect.getsource(EngineCore.__init__)
    for attribute in ("self.check_for_draft_tokens =", "self.async_scheduling =", "self.batch_queue"):
        assert attribute in source, attribute
    # What was proposed before is cleared as its request is scheduled, so no answer is missed at K = 0.
    assert "request.spec_token_ids = []" in inspect.getsource(Scheduler.schedule)


def test_a_constant_schedule_keeps_the_scheduler_from_padding() -> None:
    """Padding drafts are -1, which the CPU random rejection sampler reads past."""
    from vllm.v1.core.sched.scheduler import Scheduler

    assert "(self.num_spec_tokens > 0 and self.dynamic_sd_lookup is None)" in inspect.getsource(Scheduler)


def test_endpoint_plugins_are_called_as_ours_expects() -> None:
    from vllm.plugins.endpoint_plugins.interface import EndpointPlugin

    from server.engine.control import ControlPlugin

    assert isinstance(ControlPlugin(), EndpointPlugin)
    assert parameters(EndpointPlugin.init_state) == ["self", "engine_client", "state", "args"]


def test_vllm_reads_the_variables_we_set() -> None:
    from vllm import envs

    ours = {"VLLM_PLUGINS", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_LOGGING_LEVEL", "VLLM_NO_USAGE_STATS"}
    assert ours <= envs.environment_variables.keys()


def test_a_connector_finds_what_ours_reads_of_its_base() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import KVConnectorBlockState
    from vllm.v1.outputs import KVConnectorOutput

    source = inspect.getsource(KVConnectorBase_V1.__init__)
    assert "self._vllm_config = vllm_config" in source
    assert "self._kv_cache_config = kv_cache_config" in source
    assert parameters(KVConnectorBase_V1._get_connector_metadata) == ["self"]
    assert hasattr(KVConnectorBase_V1, "_cache_hit_source")
    source = inspect.getsource(KVConnectorPromMetrics.__init__)
    assert "self._counter_cls = " in source
    assert "self.per_engine_labelvalues = " in source
    assert {"finished_recving", "kv_connector_worker_meta"} <= {field.name for field in dataclasses.fields(KVConnectorOutput)}
    assert parameters(KVConnectorBlockState.get_block_ids)[:2] == ["self", "req_id"]
    assert callable(KVCacheBlocks.get_block_ids)


def test_the_scheduler_asks_its_own_connector_for_counts_too() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    source = inspect.getsource(Scheduler.update_from_output)
    assert "self.connector.get_kv_connector_stats()" in source
    assert "kv_connector_stats.aggregate(" in source


def test_the_configuration_keeps_what_the_layout_hash_is_made_of() -> None:
    from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, ParallelConfig, SpeculativeConfig, VllmConfig
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    needed = {
        VllmConfig: {"model_config", "cache_config", "parallel_config", "attention_config", "speculative_config"},
        ModelConfig: {"quantization", "dtype", "hf_config", "get_head_size", "get_num_layers", "get_total_num_kv_heads"},
        CacheConfig: {"block_size", "cache_dtype"},
        ParallelConfig: {"tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size", "world_size"},
        SpeculativeConfig: {"draft_model_config", "method", "use_eagle_block_drop"},
        KVTransferConfig: {"kv_load_failure_policy", "kv_role", "get_from_extra_config"},
    }
    for config, names in needed.items():
        known = {field.name for field in dataclasses.fields(config)} | set(dir(config))
        assert names <= known, config.__name__
    assert parameters(_get_attn_isa)[:4] == ["dtype", "block_size", "head_size", "kv_cache_dtype"]


def test_nixl_reads_its_lease_where_we_put_it() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_scheduler, base_worker

    for module in (base_scheduler, base_worker):
        source = inspect.getsource(module)
        assert 'get_from_extra_config(\n                "kv_lease_duration"' in source or '"kv_lease_duration", 30' in source
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST" in inspect.getsource(base_scheduler)


def test_nixl_checks_the_age_of_kv_as_ours_expects() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import connector, pull_scheduler, pull_worker
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlConnector, NixlPullConnector
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats

    assert NixlConnector is NixlPullConnector
    assert "External module path takes priority" in inspect.getsource(KVConnectorFactory.get_connector_class)
    worker = pull_worker.NixlPullConnectorWorker
    assert parameters(worker._read_blocks_for_req) == ["self", "req_id", "meta"]
    stock = inspect.getsource(worker._read_blocks_for_req)
    # When this fails, vLLM may check every read: then the connector of ours can go.
    assert "if self._bidirectional_kv_xfer_enabled and self._is_turn2_read_expired(meta):" in stock
    assert "req_id, None, self._recv_failures, record_failed_transfer=False" in stock
    for name in ("meta.remote.engine_id", "in self._invalid_remote_engines", "not in self._remote_agents"):
        assert name in stock
    assert "self.xfer_stats.record_kv_expired_req()" in stock
    assert parameters(NixlKVConnectorStats.record_kv_expired_req) == ["self"]
    scheduler = inspect.getsource(pull_scheduler)
    assert "remote_blocks_expiry_time=blocks_expiry_time" in scheduler
    assert "do_remote_prefill=is_p_node" in scheduler
    made = inspect.getsource(connector)
    assert "self.kv_transfer_config = vllm_config.kv_transfer_config" in made
    assert "self.connector_worker" in made
    for hook in ("request_finished", "request_finished_all_groups"):
        assert parameters(getattr(NixlPullConnector, hook)) == ["self", "request", "block_ids"]


def test_nixl_still_moves_the_worker_to_the_last_core() -> None:
    """When this fails, the override of `initialize_from_config` in worker_cpu.py may have lost its reason."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker
    from vllm.v1.worker.cpu_worker import CPUWorker

    assert "os.sched_setaffinity(0, rsv_cores_for_kv)" in inspect.getsource(NixlBaseConnectorWorker.__init__)
    assert parameters(CPUWorker.initialize_from_config) == ["self", "kv_cache_config"]
    assert "ensure_kv_transfer_initialized(" in inspect.getsource(CPUWorker.initialize_from_config)


def test_nixl_still_polls_without_a_pause() -> None:
    """When this fails, the mend of NIXL's progress thread may have lost its reason."""
    from vllm.distributed import nixl_utils

    api = inspect.getmodule(nixl_utils.NixlWrapper)
    assert api is not None
    assert "agent_config.pthrDelay = 0" in inspect.getsource(api)
    assert "nixlBind.nixlAgent(agent_name, agent_config)" in inspect.getsource(api)


def test_both_runners_keep_the_cache_config_the_layout_is_read_from() -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, iter_layer_specs
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1

    for runner in (RunnerV1, RunnerV2):
        assert "self.kv_cache_config = kv_cache_config" in inspect.getsource(runner)
    assert {"num_blocks", "kv_cache_groups"} <= {field.name for field in dataclasses.fields(KVCacheConfig)}
    assert {"layer_names", "kv_cache_spec"} <= {field.name for field in dataclasses.fields(KVCacheGroupSpec)}
    spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=8, dtype=torch.float32)
    assert list(iter_layer_specs(spec)) == [spec]
    assert spec.page_size_bytes == 32 * 2 * 2 * 8 * 4


def test_kv_events_are_what_the_gateway_reads() -> None:
    from vllm.distributed import kv_events as vllm_events

    from server.routing import kv_messages

    stored = vllm_events.BlockStored(
        block_hashes=[b"a" * 32, b"b" * 32],
        parent_block_hash=None,
        token_ids=[1, 2, 3, 4],
        block_size=2,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        extra_keys=[("salt",), None],
    )
    removed = vllm_events.BlockRemoved(block_hashes=[b"a" * 32], medium="GPU")
    batch = vllm_events.EventBatch(ts=1.0, events=[stored, removed, vllm_events.AllBlocksCleared()])
    read = kv_messages.decode_events(msgspec.msgpack.encode(batch))
    assert [type(event).__name__ for event in read] == ["BlockStored", "BlockRemoved", "AllBlocksCleared"]
    first = read[0]
    assert isinstance(first, kv_messages.BlockStored)
    assert (first.token_ids, first.block_size, first.keys(), first.is_plain) == ([1, 2, 3, 4], 2, [["salt"], None], True)
    publisher = vllm_events.ZmqEventPublisher
    assert not publisher._is_bind_endpoint("tcp://127.0.0.1:5557")
    assert publisher.offset_endpoint_port("ipc:///run/engine-kv.sock", 0) == "ipc:///run/engine-kv.sock"


def test_the_mended_functions_are_the_ones_we_replace() -> None:
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    stock = rejection_sampler.expand_batch_to_tokens
    assert parameters(stock) == parameters(mends.expand_batch_to_tokens)
    assert "gen.set_offset(gen.get_offset() - 4)" in inspect.getsource(GPUModelRunner)
    assert parameters(rejection_sampler.apply_top_k_top_p) == ["logits", "k", "p"]
    assert parameters(SpinCondition.wait) == ["self", "timeout_ms"]
    waiting = inspect.getsource(inspect.unwrap(SpinCondition.wait))
    assert "current_time <= self.last_read + self.busy_loop_s" in waiting


def test_the_serve_command_is_built_as_our_entry_builds_it() -> None:
    from vllm.entrypoints.cli.serve import ServeSubcommand, cmd_init

    (command,) = cmd_init()
    assert isinstance(command, ServeSubcommand)
    assert parameters(ServeSubcommand.subparser_init) == ["self", "subparsers"]
    source = (VLLM / "entrypoints" / "cli" / "main.py").read_text()
    assert 'importlib.metadata.version("vllm")' in source  # when gone, the console script works on the CPU too


def test_every_test_the_inventory_names_is_here() -> None:
    files = {path.name: path.read_text() for path in Path(__file__).parents[1].rglob("test_*.py")}
    functions = set(re.findall(r"^def (test_\w+)\(", "\n".join(files.values()), re.MULTILINE))
    named = re.findall(r"`(test_\w+(?:\.py)?)(?:\[\w+\])?`", SEAMS)
    assert len(named) > 30
    assert [name for name in named if name not in files and name not in functions] == []


@pytest.mark.parametrize("path", sorted(Path(server.engine.__file__).parent.glob("*.py")), ids=lambda path: path.stem)
def test_every_vllm_import_is_inventoried(path: Path) -> None:
    import ast

    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            for alias in node.names:
                assert f"`{alias.name}`" in SEAMS, f"{path.name} uses {node.module}.{alias.name}, SEAMS.md does not list it"
