"""What knowing where the KV is saves: conversations over two engines, by `kv_aware` and by `round_robin`, in turn in one run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from loadtest.bars.load import progress
from loadtest.bars.overhead import shown
from loadtest.bars.registry import Bench, Measured
from loadtest.client import StreamResult
from loadtest.closed_loop import run_batch
from loadtest.conversations import conversations, hold
from loadtest.exposition import total
from loadtest.processes import SystemUnderTestError
from loadtest.rig import running_gateway
from loadtest.sources import human_eval
from loadtest.statistics import percentiles_ms, quantile_ratio
from loadtest.system import Pool, running_system

POOLS = (Pool("engine-0"), Pool("engine-1"))
SETTINGS = ("learner.enabled=false", "routing.policy=kv_aware")
NUM_CONVERSATIONS = 8
NUM_TURNS = 6
ORDER = ("kv_aware", "round_robin", "round_robin", "kv_aware")
OPTIONS: dict[str, Any] = {"max_tokens": 192, "temperature": 0.0, "ignore_eos": True}
"""Answers as long as chat answers are: under `round_robin` an engine lacks the last answer, so what routing saves grows with it."""
MEAN_PAUSE_S = 2.0
PREFILLED = "vllm:prompt_tokens_by_source_total"
PREDICTIONS = "paceline_kv_predictions_total"


@dataclass
class Arm:
    """What one policy came to, over its blocks."""

    num_prefilled_tokens: float = 0.0
    results: list[StreamResult] = field(default_factory=list)

    @property
    def ttft_s(self) -> list[float]:
        return [result.chunk_times_s[0] - result.sent_at_s for result in self.results if result.chunk_times_s]


async def multi_turn(bench: Bench) -> dict[str, Measured]:
    """The system's own gateway routes by KV; a second one in front of the same engines takes them in turn.

    Every block has a system prompt of its own, so that no block finds what another left in the engines' caches.
    """
    arms = {policy: Arm() for policy in ORDER}
    problems = human_eval.load().train
    async with running_system(bench.up_arguments, SETTINGS, pools=POOLS) as system:
        other = system.gateway_config() | {"routing": {"policy": "round_robin"}}
        async with running_gateway(other, engine_token=system.engine_token) as other_url:
            urls = {"kv_aware": system.url, "round_robin": other_url}
            for url in urls.values():
                await run_batch(url, system.model, problems[-4:], concurrency=4, options={"max_tokens": 8})
            for block, policy in enumerate(ORDER):
                before = await system.read_metrics(prefilled)
                talks = conversations(
                    problems[block // 2 * NUM_CONVERSATIONS :],
                    name=f"block-{block}",
                    number=NUM_CONVERSATIONS,
                    num_turns=NUM_TURNS,
                )
                arms[policy].results += await hold(
                    urls[policy], system.model, talks, options=OPTIONS, mean_pause_s=MEAN_PAUSE_S, seed=block // 2
                )
                num_tokens = await system.read_metrics(prefilled) - before
                arms[policy].num_prefilled_tokens += num_tokens
                progress(f"block {block + 1} of {len(ORDER)}, {policy}: {num_tokens:.0f} tokens prefilled")
        metrics = await system.metrics()
    return {**values(arms["kv_aware"], arms["round_robin"]), "index_hit_pct": index_hits(metrics)}


def prefilled(text: str) -> float:
    """Prompt tokens the engines have computed so far; raises SystemUnderTestError where an engine does not say."""
    counts = [total(text, PREFILLED, source="local_compute", engine=pool.id) for pool in POOLS]
    if None in counts:
        raise SystemUnderTestError(f"the metrics page lacks {PREFILLED} of an engine")
    return sum(count for count in counts if count is not None)


def values(aware: Arm, in_turn: Arm) -> dict[str, Measured]:
    """The three comparisons of the two policies."""
    detail = {
        "prefilled_tokens": {"kv_aware": aware.num_prefilled_tokens, "round_robin": in_turn.num_prefilled_tokens},
        "requests": {"kv_aware": len(aware.results), "round_robin": len(in_turn.results)},
    }
    saving = in_turn.num_prefilled_tokens / aware.num_prefilled_tokens if aware.num_prefilled_tokens else None
    found = {"prefill_saving": Measured(saving, detail)}
    waits = {"kv_aware_ms": percentiles_ms(aware.ttft_s), "round_robin_ms": percentiles_ms(in_turn.ttft_s)}
    for name, quantile in (("ttft_p50_ratio", 0.5), ("ttft_p99_ratio", 0.99)):
        ratio = quantile_ratio(aware.ttft_s, in_turn.ttft_s, quantile)
        found[name] = Measured(ratio.value, {"ratio": shown(ratio), **waits})
    return found


def index_hits(metrics: str) -> Measured:
    """Share of predictions of the KV index that the engines' own reports bear out."""
    outcomes = {name: total(metrics, PREDICTIONS, outcome=name) or 0.0 for name in ("correct", "over", "under")}
    number = sum(outcomes.values())
    tokens = {name: total(metrics, f"paceline_kv_{name}_tokens_total") for name in ("predicted", "reported")}
    detail = {"predictions": outcomes, "cached_tokens": tokens}
    if not number:
        return Measured(None, {"reason": "the gateway compared no prediction with an engine's report", **detail})
    return Measured(100 * outcomes["correct"] / number, detail)
