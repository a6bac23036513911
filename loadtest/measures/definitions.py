"""The measures of one request. METRICS.md says what each means and how it differs from other tools.

Each is None where the request has no such thing. All latencies count from the intended send time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from loadtest.measures.histogram import Floats
from loadtest.records import RequestRecord
from loadtest.scenario import Slo

_ROUNDING = 1e-6
"""Of a token's number, where chunks are scaled."""


def ttft_s(record: RequestRecord) -> float | None:
    """Intended send time to the first chunk that carried tokens."""
    return record.chunk_times_s[0] - record.intended_at_s if record.chunk_times_s else None


def e2e_s(record: RequestRecord) -> float:
    """Intended send time to the end of the answer, end mark included."""
    return record.ended_at_s - record.intended_at_s


def num_tokens(record: RequestRecord) -> int:
    """Tokens of the answer as the server counts them, else as the chunks carried them."""
    return record.num_completion_tokens if record.num_completion_tokens is not None else sum(record.chunk_token_counts)


def tpot_s(record: RequestRecord) -> float | None:
    """Seconds per token after the first, first chunk to last chunk."""
    tokens = num_tokens(record)
    return (record.chunk_times_s[-1] - record.chunk_times_s[0]) / (tokens - 1) if tokens > 1 and record.chunk_times_s else None


def itls_s(record: RequestRecord) -> list[float]:
    """The waits between chunks. A chunk of a speculating engine carries several tokens, see `tokens_per_chunk`."""
    return [later - earlier for earlier, later in pairwise(record.chunk_times_s)]


def tokens_per_chunk(record: RequestRecord) -> float | None:
    """How many tokens came at once, on average."""
    return num_tokens(record) / len(record.chunk_times_s) if record.chunk_times_s else None


def acceptance_length(record: RequestRecord) -> float | None:
    """AL of one request: one token per verify step and the proposals accepted in it."""
    steps = record.accepted_per_step
    return 1.0 + sum(steps) / len(steps) if steps else None


def verify_times_s(record: RequestRecord) -> Floats:
    """When the last token of each verify step came, [steps].

    A step emits what it accepted and one token; the prefill emits the first. Steps without a proposal are not told: where the
    answer is longer than the steps that are, those are spread over it evenly. The last step may emit more than was asked for.
    """
    emitted = np.cumsum(np.asarray(record.accepted_per_step, dtype=float) + 1.0)
    arrived = np.cumsum(np.asarray(tokens_by_chunk(record), dtype=float))
    later = max(arrived[-1] - 1.0, 0.0)
    token = 1.0 + np.minimum(emitted * max(later / emitted[-1], 1.0), later)
    chunk = np.searchsorted(arrived, token - _ROUNDING)
    return np.asarray(record.chunk_times_s)[np.minimum(chunk, len(arrived) - 1)]


def is_good(record: RequestRecord, slo: Slo) -> bool:
    """Answered whole, and within every objective; a request without a TPOT keeps any objective for it."""
    return record.outcome == "ok" and all(
        limit_ms is None or value_s is None or 1e3 * value_s <= limit_ms
        for limit_ms, value_s in ((slo.ttft_ms, ttft_s(record)), (slo.tpot_ms, tpot_s(record)), (slo.e2e_ms, e2e_s(record)))
    )


def tokens_by_chunk(record: RequestRecord) -> Sequence[float]:
    """Tokens that each chunk brought, scaled so that they add up to what the server counted."""
    counted = sum(record.chunk_token_counts)
    if not counted or record.num_completion_tokens in (None, counted):
        return record.chunk_token_counts
    scale = record.num_completion_tokens / counted
    return [scale * count for count in record.chunk_token_counts]
