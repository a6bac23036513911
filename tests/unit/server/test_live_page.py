"""The live page as files: who may have them, what they are sent with, and that they need nothing from elsewhere."""

from __future__ import annotations

import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

from gateway_rig import run, running

ROOT = Path(__file__).resolve().parents[3]
UI = ROOT / "server" / "ui"
NAMES = sorted(path.name for path in UI.iterdir() if path.suffix in {".html", ".css", ".js", ".svg"})


def test_page_and_files_come_without_the_token_and_under_a_strict_policy(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            for path in ("/ui", "/ui/", *(f"/ui/{name}" for name in NAMES)):
                async with rig.session.get(rig.admin_url + path) as reply:
                    assert reply.status == 200, path
                    policy = [part.strip() for part in reply.headers["Content-Security-Policy"].split(";")]
                    assert "default-src 'self'" in policy
                    assert "frame-ancestors 'none'" in policy
                    assert "unsafe" not in reply.headers["Content-Security-Policy"]
                    assert reply.headers["X-Content-Type-Options"] == "nosniff"
                    assert reply.headers["Referrer-Policy"] == "no-referrer"
                    assert reply.headers["Cache-Control"] == "no-cache"
                    name = path.removeprefix("/ui").lstrip("/") or "index.html"
                    assert await reply.read() == (UI / name).read_bytes()
            async with rig.session.get(f"{rig.admin_url}/ui/main.js") as reply:
                assert reply.content_type == "text/javascript"
            async with rig.session.head(f"{rig.admin_url}/ui") as reply:
                assert (reply.status, reply.content_type) == (200, "text/html")

    run(scenario())


def test_nothing_but_the_page_s_files_comes_without_the_token(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            for path in ("/ui/../server/main.py", "/ui/%2e%2e/main.py", "/ui/__init__.py", "/ui/nothing", "/ui//etc/passwd"):
                assert (await rig.admin("GET", path, token="none")).status in (401, 404), path
            for path in ("/", "/uix", "/UI", "/admin/history", "/admin/status", "/ui/../admin/status", "/metrics"):
                assert (await rig.admin("GET", path, token="wrong")).status == 401, path
            assert (await rig.admin("POST", "/ui")).status == 405
            assert (await rig.request("GET", "/ui")).status == 404, "the public port has no page"

    run(scenario())


def test_page_has_no_inline_script_or_style_and_nothing_external() -> None:
    page = (UI / "index.html").read_text()
    assert re.findall(r"<script(?![^>]*\bsrc=)", page) == []
    assert re.findall(r"<style|\sstyle=|\son\w+=|javascript:", page) == []
    for name in NAMES:
        text = (UI / name).read_text().replace("http://www.w3.org/2000/svg", "")
        assert re.findall(r"https?://|//[a-z]+\.|@import|url\(", text) == [], name
        for word in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "Function(",
            "localStorage",
            "cookie",
        ):
            assert word not in text, f"{name} uses {word}"


def test_every_file_the_page_names_is_there() -> None:
    named = set(re.findall(r'"/ui/([^"]+)"', (UI / "index.html").read_text()))
    for path in UI.glob("*.js"):
        named |= set(re.findall(r'from "\./([^"]+)"', path.read_text()))
    assert named | {"index.html"} == set(NAMES)


def test_page_has_words_for_every_path_and_reason() -> None:
    words = (UI / "words.js").read_text()
    routing = ROOT / "server" / "routing"
    router, tokens = (routing / "router.py").read_text(), (routing / "tokens.py").read_text()
    found = set(re.findall(r'_Unknown\("(\w+)"\)|Prompt\(session=session, reason="(\w+)"', tokens))
    found |= {(word,) for word in re.findall(r'^    "\w+": "(\w+)",$', tokens, re.MULTILINE)}
    found |= {("one_engine",), *((word,) for word in re.findall(r'reason="(\w+)"', router))}
    found |= {(word,) for choice in re.findall(r"_Choice\((.*)", router) for word in re.findall(r'"(\w+)"', choice)}
    reasons = {word for group in found for word in group if word}
    assert {"tools", "not_cached", "mismatch", "several_prompts", "slow", "prefill_failed", "remote_prefill"} <= reasons
    assert [word for word in sorted(reasons) if f"  {word}: " not in words] == []


def test_the_readme_s_picture_of_it_is_there_and_small() -> None:
    (name,) = re.findall(r"!\[[^]]+\]\((docs/live_page\.png)\)", (ROOT / "README.md").read_text())
    picture = (ROOT / name).read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) < 200_000


def test_a_wheel_has_every_file() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert "server.ui" in tool["packages"]
    patterns = tool["package-data"]["server.ui"]
    assert [name for name in NAMES if not any(fnmatch(name, pattern) for pattern in patterns)] == []
