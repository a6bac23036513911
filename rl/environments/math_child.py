"""A process that compares mathematical answers with math-verify, one after another, with no deadline of its own.

math-verify's own deadlines are alarm signals: they work in a main thread only, and not while a large power is being computed.
`math_verifier.py` kills this process instead.

usage: python -m rl.environments.math_child PARENT_PID
"""

from __future__ import annotations

import resource
import sys

from msgspec import msgpack

from rl.environments.child import frames_of_child, read_frame, write_frame
from rl.environments.math_verifier import Comparison, Verdict

MEMORY_BYTES = 4 << 30
"""Of address space: a tower of powers takes all there is, before it is late."""


def compare(comparison: Comparison) -> Verdict:
    """math-verify is not symmetric: the right answer comes first."""
    from math_verify import parse, verify

    expected = parse(_boxed(comparison.expected), parsing_timeout=None) if comparison.expected.strip() else []
    if not expected:
        return "unreadable"
    said = parse(_boxed(comparison.said), parsing_timeout=None)
    return "right" if verify(expected, said, timeout_seconds=None) else "wrong"


def _boxed(answer: str) -> str:
    """In the form that is read whole; of running text the last thing that looks like an answer would be taken."""
    return f"\\boxed{{{answer.strip('$')}}}"


def main() -> None:
    incoming, outgoing = frames_of_child(int(sys.argv[1]))
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    compare(Comparison("1", "1"))  # imports computer algebra, which takes longer than any answer may
    write_frame(outgoing, msgpack.encode("ready"))
    while (frame := read_frame(incoming)) is not None:
        write_frame(outgoing, msgpack.encode(compare(msgpack.decode(frame, type=Comparison))))


if __name__ == "__main__":
    main()
