"""What a run of the tests says where no Chromium is installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

UNIT = Path(__file__).parent


def test_a_run_without_chromium_says_which_tests_it_left_out(tmp_path: Path) -> None:
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(UNIT / "server" / "test_live_page_in_chromium.py"),
    ]
    found = subprocess.run(
        argv, cwd=UNIT.parents[1], env=os.environ | {"PATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout
    (number,) = re.findall(r"(\d+) skipped", found.stdout)
    assert f"Pages were not looked at, {number} tests: no Chromium on this machine: apt-get install chromium" in found.stdout
    assert "passed" not in found.stdout
