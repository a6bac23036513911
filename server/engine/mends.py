"""Mends of vLLM 0.32.0 on the CPU. Each is one function, checks what it replaces, and says when it can go.

One more fault, the CPU random rejection sampler reading past -1 placeholder drafts, needs no mend: a constant
speculation schedule keeps the scheduler from padding with placeholders (SEAMS.md), and a test holds that.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from vllm.compilation import decorators
from vllm.distributed import nixl_utils
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.v1.sample import rejection_sampler

MEND_EXPAND = "mend:expand_batch_to_tokens"
MEND_SEEDED = "mend:seeded_chunked_prefill"
MEND_TIED_HEAD = "mend:tied_lm_head"
MEND_TOP_K = "mend:top_k_of_no_rows"
MEND_NIXL = "mend:nixl_progress_thread"
MEND_COMPILED = "mend:compiled_model_loads"
MEND_WAITING = "mend:waiting_without_a_core"

_load_compiled_function = torch.compiler.load_compiled_function
_NIXL_PAUSE_US = 1000
"""Adds at most this to a transfer, which takes tens of milliseconds on a CPU."""
_SPIN_S = 0.0005
"""As long as the short calls of a step take: they are answered without a pause."""
_PAUSE_S = 0.0005
"""Adds at most this to a step, which takes tens of milliseconds on a CPU."""
_WAIT_PARAMETERS = ["self", "timeout_ms"]
_LOAD_PARAMETERS = ["model", "aot_compilation_path"]
_EXPAND_PARAMETERS = ["x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to"]


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """[num_requests] -> [num_tokens]: each request's value repeated for its tokens, `replace_from` turned into `replace_to`.

    `cu_num_tokens` [num_requests] is the inclusive running total of tokens.
    """
    counts = torch.diff(cu_num_tokens.long(), prepend=cu_num_tokens.new_zeros(1, dtype=torch.long))
    values = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return torch.repeat_interleave(values, counts, output_size=num_tokens)


def mend_expand_batch_to_tokens() -> None:
    """Speculation at temperature > 0 reads uninitialised memory.

    The stock function hands its kernel an int64 copy of the output and returns the untouched original, so temperature,
    top-k and top-p of speculated rows are whatever memory held. Replaces
    vllm/v1/sample/rejection_sampler.py:expand_batch_to_tokens. Remove when the stock function fills a prefilled output
    on the CPU (tests/engine/test_mends.py shows it).
    """
    stock = rejection_sampler.expand_batch_to_tokens
    if stock is expand_batch_to_tokens:
        return
    found = list(inspect.signature(stock).parameters)
    if found != _EXPAND_PARAMETERS:
        raise RuntimeError(f"expand_batch_to_tokens takes {found}, the mend replaces {_EXPAND_PARAMETERS}; see SEAMS.md")
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def mend_top_k_of_no_rows() -> None:
    """A request with top-k and without top-p ends the engine in a step in which nothing was proposed.

    The rejection sampler then masks no rows, and the largest k of none is asked for: torch raises. Wraps
    vllm/v1/sample/rejection_sampler.py:apply_top_k_top_p. Remove when vllm/v1/sample/ops/topk_topp_sampler.py:apply_top_k_only
    takes no rows (tests/engine/test_mends.py shows it).
    """
    stock = rejection_sampler.apply_top_k_top_p
    if getattr(stock, "is_mended", False):
        return

    def apply_top_k_top_p(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> torch.Tensor:
        masked: torch.Tensor = stock(logits, k, p) if logits.shape[0] else logits
        return masked

    apply_top_k_top_p.is_mended = True  # type: ignore[attr-defined]
    rejection_sampler.apply_top_k_top_p = apply_top_k_top_p


@contextmanager
def shielded_generators(runner: Any) -> Iterator[None]:
    """Keep per-request generators away from rows whose sample will be thrown away.

    After a partial prefill chunk the stock V1 runner rewinds the generator by offset, which CPU generators do not have:
    one seeded request with a chunked prompt ends the engine. Taking those generators out for the step has the same
    effect as the rewind. Remove when GPUModelRunner._bookkeeping_sync no longer calls `set_offset` on the CPU.
    """
    generators: dict[int, torch.Generator] = runner.input_batch.generators
    if not generators:
        yield
        return
    discarded = runner.discard_request_mask.np[: runner.input_batch.num_reqs]
    held = {row: generators.pop(row) for row in list(generators) if row < len(discarded) and discarded[row]}
    try:
        yield
    finally:
        generators.update(held)


def refresh_tied_heads(model: torch.nn.Module) -> None:
    """Pack lm_head anew from the embedding it shares after a target update.

    On the CPU a tied head holds a packed copy of the embedding which the layerwise reload does not rebuild: the model
    would embed with the new weights and predict with the old. Remove when finalize_layerwise_reload processes
    ParallelLMHead modules whose weight was loaded through another module.
    """
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and module.weight.numel():
            module.quant_method.process_weights_after_loading(module)


def mend_nixl_progress_thread() -> None:
    """NIXL's progress thread takes a whole core, busy or idle: its Python API sets the pause between two polls to 0.

    Agents made after this call pause for a millisecond. Call it only where NIXL is installed. Remove when
    `nixl_agent_config` takes the pause and vLLM passes one on a CPU.
    """
    # Through vLLM, which sets what UCX reads when NIXL is imported.
    bindings = sys.modules[nixl_utils.NixlWrapper.__module__].nixlBind
    stock = bindings.nixlAgent
    if getattr(stock, "is_mended", False):
        return

    def agent(name: str, config: Any) -> Any:
        config.pthrDelay = _NIXL_PAUSE_US
        return stock(name, config)

    agent.is_mended = True  # type: ignore[attr-defined]
    bindings.nixlAgent = agent


def _load_whole(file: Any, **options: Any) -> Any:
    """torch.compiler.load_compiled_function, whose result knows how to finish loading."""
    loaded = _load_compiled_function(file, **options)
    compiled = loaded._artifacts.compiled_fn
    if not hasattr(compiled, "finalize_loading"):
        compiled.finalize_loading = lambda _: None
    return loaded


def mend_loading_of_compiled_models() -> None:
    """What the CPU compiled is saved and then never loaded: each start of an engine compiles for minutes.

    vLLM asks every loaded model to finish loading, which only the functions of its own compiler backend know how to; the CPU
    uses Inductor's, whose loaded functions are whole. Wraps vllm/compilation/decorators.py:_try_load_aot_compiled_fn, so that
    a function without `finalize_loading` has one that does nothing. Remove when vLLM skips such functions
    (tests/engine/test_mends.py shows it).
    """
    stock = decorators._try_load_aot_compiled_fn
    if getattr(stock, "is_mended", False):
        return
    found = list(inspect.signature(stock).parameters)
    if found != _LOAD_PARAMETERS:
        raise RuntimeError(f"_try_load_aot_compiled_fn takes {found}, the mend wraps {_LOAD_PARAMETERS}; see SEAMS.md")

    @wraps(stock)
    def load(model: Any, aot_compilation_path: str) -> Any:
        torch.compiler.load_compiled_function = _load_whole
        try:
            return stock(model, aot_compilation_path)
        finally:
            torch.compiler.load_compiled_function = _load_compiled_function

    load.is_mended = True  # type: ignore[attr-defined]
    decorators._try_load_aot_compiled_fn = load


def mend_waiting_without_a_core() -> None:
    """An engine's core and its worker take a whole core each while they wait for one another: they look for the answer, yield, and
    look again, for a second after every answer. On a CPU that core is somebody's who computes.

    Wraps vllm/distributed/device_communicators/shm_broadcast.py:SpinCondition.wait: but for the first half millisecond a reader sleeps
    between two looks. Being woken by the writer, as after that second, is no way: wake-ups in quick succession get lost. Remove when
    vLLM has an option for it, or waits so on a CPU by itself (tests/engine/test_mends.py shows it).
    """
    stock = SpinCondition.wait
    if getattr(stock, "is_mended", False):
        return
    found = list(inspect.signature(stock).parameters)
    if found != _WAIT_PARAMETERS:
        raise RuntimeError(f"SpinCondition.wait takes {found}, the mend wraps {_WAIT_PARAMETERS}; see SEAMS.md")

    @wraps(stock)
    def wait(self: SpinCondition, timeout_ms: int | None = None) -> None:
        if _SPIN_S < time.monotonic() - self.last_read <= self.busy_loop_s:
            time.sleep(_PAUSE_S)
        else:
            stock(self, timeout_ms)

    wait.is_mended = True  # type: ignore[attr-defined]
    SpinCondition.wait = wait
