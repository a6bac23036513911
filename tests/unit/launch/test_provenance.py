from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from launch import provenance


def test_an_installation_inside_somebody_else_s_checkout_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@x"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "theirs"], check=True)
    for root, is_checkout in ((tmp_path, True), (tmp_path / "site-packages", False)):
        (root / "launch").mkdir(parents=True)
        monkeypatch.setattr(provenance, "__file__", str(root / "launch" / "provenance.py"))
        assert (provenance.git_revision() is not None) == is_checkout
