"""Run our load tester and another one in turn and print what both report.

python -m loadtest.crosscheck vllm                                # in front of a mock engine
python -m loadtest.crosscheck aiperf --url http://127.0.0.1:8000  # any vLLM, behind whatever gateway
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from loadtest.crosscheck.turns import TOOLS, Turns, in_turn
from loadtest.crosscheck.workload import Workload, questions
from loadtest.mock_engine import Pace
from loadtest.processes import SystemUnderTestError, one_core_left_free
from loadtest.rig import mock_addresses, running_mocks
from loadtest.system import planned, served_model
from wire.errors import PacelineError

PACE = Pace(first_token_s=0.2, between_tokens_s=0.02)
"""Of the mock engine, about that of a small model on a CPU: how both sides agree depends on what a request takes."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 where both sides measured, 2 where one could not."""
    options = _parser().parse_args(argv)
    try:
        turns = asyncio.run(_compare(options))
    except (SystemUnderTestError, PacelineError, aiohttp.ClientError) as error:
        print(f"crosscheck: {error}", file=sys.stderr)
        return 2
    print("\n".join(turns.table()))
    print(f"apart by {turns.worst_pct:.2f} % at most")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtest.crosscheck", description="Our load tester beside another one.")
    parser.add_argument("tool", choices=TOOLS)
    parser.add_argument("--url", help="the server, without /v1 (default: a mock engine is started)")
    parser.add_argument("--tokenizer", type=Path, help="directory of the model's tokenizer (default: the target's)")
    parser.add_argument("--duration-s", type=float, default=60.0, help="of each of our two runs, seconds (default 60)")
    parser.add_argument("--concurrency", type=int, default=4, help="requests at a time (default 4)")
    parser.add_argument("--max-tokens", type=int, default=48, help="tokens of an answer at most (default 48)")
    return parser


async def _compare(options: argparse.Namespace) -> Turns:
    with one_core_left_free() as cores:
        async with _server(options.url) as url:
            workload = Workload(
                url=url,
                model=await served_model(url),
                tokenizer_dir=(options.tokenizer or Path(planned(())["target_dir"])).absolute(),
                prompts=questions(),
                concurrency=options.concurrency,
                max_tokens=options.max_tokens,
                cores=cores,
            )
            return await in_turn(TOOLS[options.tool], workload, options.duration_s, lambda line: print(line, file=sys.stderr))


@asynccontextmanager
async def _server(url: str | None) -> AsyncIterator[str]:
    if url is not None:
        yield url.rstrip("/").removesuffix("/v1")
        return
    addresses = mock_addresses(1, PACE)
    async with running_mocks(addresses):
        yield addresses[0].url


if __name__ == "__main__":
    sys.exit(main())
