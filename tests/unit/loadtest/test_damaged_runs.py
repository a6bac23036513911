"""Reports and comparisons of directories that a crash, a full disk or a careless hand left: what is readable counts, the rest is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from written_run import request, sample, write_run

from loadtest.report.analysis import analyse
from loadtest.report.command import report
from loadtest.report.compare import compare

REQUESTS = [request(index, at_s=float(index)) for index in range(40)]
WHOLE = msgspec.to_builtins(REQUESTS[0])


def spoiled(**fields: Any) -> bytes:
    return json.dumps({**WHOLE, **fields}).encode()


GARBAGE = {
    "bytes": b"\x00\xff\xfe\x80",
    "half a character": b'{"lane": "\xc3"}',
    "brackets": b"[" * 100_000,
    "another record": b'{"at_s": 1}',
    "long": b"x" * (17 << 20),
    "times in another unit": spoiled(ended_at_s=1.7e18),
    "times that go back": spoiled(ended_at_s=-5.0),
    "a count too few": spoiled(chunk_token_counts=[1]),
    "an endless depth": spoiled(accepted_per_step=[10**12]),
    "a negative count": spoiled(num_completion_tokens=-7),
}


@pytest.mark.parametrize("line", GARBAGE.values(), ids=GARBAGE.keys())
def test_a_line_that_is_no_request_is_left_out_and_counted(line: bytes, tmp_path: Path) -> None:
    write_run(tmp_path, REQUESTS)
    with (tmp_path / "requests.jsonl").open("ab") as file:
        file.write(line + b"\n" + line)
    with (tmp_path / "timeline.jsonl").open("wb") as file:
        file.write(msgspec.json.encode(sample(1.0)) + b"\n" + line[:1000] + b"\n" + msgspec.json.encode(sample(1e300)))
    found = analyse(tmp_path)
    assert found.everything.num_requests == len(REQUESTS)
    assert found.run.num_unreadable == {"requests.jsonl": 2, "timeline.jsonl": 2}


def test_damaged_files_get_a_report_and_are_compared(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / name, REQUESTS, [sample(1.0)])
        for file in ("requests.jsonl", "run.json", "timeline.jsonl"):
            path = tmp_path / name / file
            path.write_bytes(b"\xff\xfe\n" + path.read_bytes()[:-20] + b"\x00")
    said: list[str] = []
    assert report(tmp_path / "a", None, said.append) == 1
    assert "the run was killed" in said[0]
    assert compare(tmp_path / "a", tmp_path / "b", said.append, as_json=False, fail_on_regression=True, lossless=True) == 1
    assert f"{len(REQUESTS) - 1} of {len(REQUESTS) - 1} equal" in said[-1]


def test_names_that_look_like_formulas_are_names(tmp_path: Path) -> None:
    lanes = [request(index, at_s=float(index), lane=f"$\\frac{{{index % 2}$", domain="$x$ $") for index in range(40)]
    write_run(tmp_path, lanes)
    assert report(tmp_path, None, lambda _line: None) == 0
    assert "$\\frac{1$" in (tmp_path / "report.html").read_text()
