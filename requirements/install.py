"""Install a lock file with pip and show one progress bar instead of hundreds of lines. Standard library only.

usage: python requirements/install.py LOCK LOG
The full output of pip goes to LOG; its last lines are shown where it fails.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path
from typing import TextIO

_WIDTH = 30
_PLAIN_EVERY_S = 15.0


class Bar:
    """A bar on a terminal, a line now and then elsewhere."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._started_at_s = time.monotonic()
        self._printed_at_s = self._started_at_s

    def show(self, done: int, what: str) -> None:
        elapsed_s = time.monotonic() - self._started_at_s
        if sys.stdout.isatty():
            filled = _WIDTH * done // self._num_steps
            gauge = "█" * filled + "░" * (_WIDTH - filled)
            line = f"      {gauge} {100 * done // self._num_steps:3d} % {elapsed_s:4.0f} s  {what}"
            # A line that wraps cannot be drawn over.
            print(f"\r\033[K{line[: shutil.get_terminal_size().columns - 1]}", end="", flush=True)
        elif time.monotonic() - self._printed_at_s >= _PLAIN_EVERY_S:
            self._printed_at_s = time.monotonic()
            print(f"      {100 * done // self._num_steps} % {elapsed_s:.0f} s  {what}", flush=True)


class Reading:
    """What pip has said so far."""

    def __init__(self) -> None:
        self.num_seen = 0
        self.what = ""
        self.is_over = False

    def follow(self, pip: subprocess.Popen[str], log: TextIO) -> None:
        assert pip.stdout is not None
        for line in pip.stdout:
            log.write(line)
            first, _, rest = line.strip().partition(" ")
            if first in ("Collecting", "Processing", "Requirement"):
                self.num_seen += 1
                self.what = Path(rest.split(" ")[0]).name
            self.is_over = self.is_over or first == "Installing"


def _num_installed(site: Path) -> int:
    return sum(1 for _ in site.glob("*.dist-info"))


def main() -> int:
    lock, log_file = Path(sys.argv[1]), Path(sys.argv[2])
    num_packages = sum("==" in line for line in lock.read_text().splitlines() if not line.startswith("#"))
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--disable-pip-version-check",
        "--no-input",
        "-r",
        str(lock),
    ]
    # Reading the packages is half of the work, writing them the other half, of which pip says nothing: what has appeared
    # on disk is counted.
    bar = Bar(2 * num_packages)
    site = Path(sysconfig.get_path("purelib"))
    reading = Reading()
    num_before = _num_installed(site)
    with (
        log_file.open("w") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip,
    ):
        reader = threading.Thread(target=reading.follow, args=(pip, log))
        reader.start()
        while reader.is_alive():
            reader.join(timeout=0.5)
            if reading.is_over:
                num_written = min(max(_num_installed(site) - num_before, 0), num_packages)
                bar.show(num_packages + num_written, "writing packages")
            else:
                bar.show(min(reading.num_seen, num_packages), reading.what)
    if pip.returncode == 0:
        bar.show(2 * num_packages, "done")
    print(flush=True)
    if pip.returncode != 0:
        tail = log_file.read_text().splitlines()[-20:]
        print("\n".join(tail), file=sys.stderr)
        if any("torch==" in line for line in tail):
            print("torch's +cpu build is on PyTorch's own CPU wheel index: set PIP_EXTRA_INDEX_URL to it", file=sys.stderr)
        print(f"pip failed; its full output is in {log_file}", file=sys.stderr)
    return pip.returncode


if __name__ == "__main__":
    sys.exit(main())
