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


def test_a_changed_tree_goes_by_what_was_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@x"]
    code = tmp_path / "launch" / "provenance.py"
    code.parent.mkdir()
    code.write_text("1\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setattr(provenance, "__file__", str(code))

    def told(text: str) -> str:
        code.write_text(text)
        revision = provenance.git_revision()
        assert revision is not None
        return revision

    clean = told("1\n")
    assert len(clean) == 12
    assert told("2\n").startswith(f"{clean}-dirty-")
    assert told("2\n") == told("2\n") != told("3\n")
    assert told("1\n") == clean
