"""vLLM's own load tester: `python -m server.engine.bench_serve OPTIONS`, as `vllm bench serve` where vLLM's own command starts.

That command asks for the metadata of a distribution named `vllm`, which the CPU build is not.
"""

from __future__ import annotations

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    main(parser.parse_args())
