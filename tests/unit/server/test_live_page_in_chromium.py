"""The live page in a real browser, in front of a real gateway. Skipped only where no Chromium is installed."""

from __future__ import annotations

import asyncio
import re
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from browser import Page, chromium, needs_chromium
from gateway_rig import OPERATOR_TOKEN, GatewayRig, eventually, publish, running
from live_scene import HOSTILE, stage_scene

pytestmark = needs_chromium

LIMIT_S = 300.0
"""The browser alone takes seconds to start where other things run."""
CONTRAST = """
(() => {
  const paint = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const light = (name) => {
    paint.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(name);
    paint.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...paint.getImageData(0, 0, 1, 1).data].slice(0, 3).map((byte) => {
      const share = byte / 255;
      return share <= 0.03928 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (front, back) => {
    const [high, low] = [light(front), light(back)].sort((left, right) => right - left);
    return (high + 0.05) / (low + 0.05);
  };
  const texts = ["--ink", "--muted", "--good", "--bad", "--busy", "--accent"];
  const lines = ["--s0", "--s1", "--s2", "--s3", "--s4", "--s5", "--s6"];
  return {
    text: Math.min(...texts.map((name) => ratio(name, "--card")), ratio("--good", "--good-soft"), ratio("--bad", "--bad-soft"), ratio("--busy", "--busy-soft")),
    line: Math.min(...lines.map((name) => ratio(name, "--card"))),
  };
})()
"""

HIDDEN_BUTTONS = """
[...document.querySelectorAll("td.action button")].filter((one) => {
  const [button, card] = [one, one.closest(".scroll")].map((part) => part.getBoundingClientRect());
  return button.left < card.left || button.right > card.right;
}).map((one) => one.outerHTML)
"""


def run(scenario: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(LIMIT_S):
            await scenario

    asyncio.run(bounded())


@asynccontextmanager
async def opened(
    tmp_path: Path, *, prepare: Callable[[GatewayRig], Coroutine[Any, Any, None]], num_engines: int = 2
) -> AsyncIterator[tuple[GatewayRig, Page]]:
    """A gateway, and a browser that has signed in to its page."""
    async with running(tmp_path / "state", num_engines=num_engines) as rig, chromium(tmp_path / "profile") as page:
        await prepare(rig)
        await page.look(width=1600, height=1000, scheme="light")
        await page.open(f"{rig.admin_url}/ui")
        await sign_in(page, OPERATOR_TOKEN)
        await page.until("document.querySelector('#drafts tbody tr')")
        yield rig, page


async def sign_in(page: Page, token: str) -> None:
    await page.ask("document.getElementById('token').focus()")
    await page.type(token)
    await page.press("Enter")


async def confirm(page: Page, selector: str) -> None:
    await page.until("!document.getElementById('confirm').open")  # the answer to an earlier one closes it
    await page.click(selector)
    await page.until("document.getElementById('confirm').open")
    await page.click("#confirm-go")


async def _two_drafts(rig: GatewayRig) -> None:
    publish(rig.state_dir)
    publish(rig.state_dir)


def test_the_token_is_asked_for_once_and_kept_in_the_tab_only(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path / "state") as rig, chromium(tmp_path / "profile") as page:
            await page.open(f"{rig.admin_url}/ui")
            await page.until("!document.getElementById('sign-in').hidden")
            assert await page.ask("document.getElementById('app').hidden")
            await sign_in(page, "wrong-token")
            await page.until("document.getElementById('token-error').textContent")
            assert "not accepted" in await page.text("#token-error")
            assert await page.ask("sessionStorage.length") == 0
            await page.ask("document.getElementById('token').value = ''")
            page.complaints.clear()
            await sign_in(page, OPERATOR_TOKEN)
            await page.until("document.querySelector('#drafts tbody tr')")
            await page.open(f"{rig.admin_url}/ui")
            await page.until("document.querySelector('#drafts tbody tr')")
            assert await page.text("#decisions") == "None since the gateway started."
            assert await page.ask("Object.values(sessionStorage)") == [OPERATOR_TOKEN]
            assert await page.ask("[localStorage.length, document.cookie, location.search, location.hash]") == [0, "", "", ""]
            assert not await page.ask(f"document.documentElement.outerHTML.includes('{OPERATOR_TOKEN}')")
            assert not [url for url in page.requested if OPERATOR_TOKEN in url]
            assert not [url for url in page.requested if not url.startswith(rig.admin_url)], "nothing from elsewhere"
            assert page.complaints == []
            await page.click("[data-action='sign-out']")
            assert await page.ask("[sessionStorage.length, document.getElementById('app').hidden]") == [0, True]

    run(scenario())


def test_the_past_is_drawn_and_a_hostile_name_is_text(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, prepare=stage_scene) as (_, page):
            await page.click("[data-window='1800']")
            await page.until("document.querySelectorAll('#plot-al path.line').length === 5")
            assert await page.ask("document.querySelectorAll('img[src=\"x\"], img[onerror]').length") == 0
            for selector in ("#tenants", "#legend"):
                assert await page.ask(f"document.querySelector('{selector}').textContent.includes('{HOSTILE}')")
            assert await page.ask("document.querySelectorAll('#plot-al .mark.activate').length") == 3
            assert await page.ask("document.querySelectorAll('#plot-al .mark.rollback').length") == 1
            assert await page.ask("document.querySelectorAll('#plot-al .mark.rejected').length") >= 4
            decisions = await page.text("#decisions")
            for words in (
                "rolled back to, by the canary",
                "a drop beyond 10%",
                "Gate rejected a candidate",
                "Gate accepted v3",
            ):
                assert words in decisions
            assert "remote prefill is cheaper" in await page.text("#paths")
            assert "43%" in await page.text("#engines")
            assert "1.182" in await page.text("#learner")
            await page.click("[data-view='position']")
            await page.until("document.querySelectorAll('#plot-al path.line').length === 3")
            await page.click("[data-unit='requests']")
            await page.until("document.querySelectorAll('#plot-throughput path.line').length === 2")
            assert "refused/s" in await page.ask("document.getElementById('plot-throughput').textContent")
            first_byte = str(await page.ask("document.getElementById('plot-latency').ariaLabel"))
            p50_ms, p99_ms = (int(value) for value in re.findall(r"p\d+ (\d+) ms", first_byte))
            assert 60 <= p50_ms < p99_ms <= 1500, first_byte
            await page.click("[data-latency='gap']")
            await page.until("document.querySelectorAll('#plot-latency path.line').length === 1")
            gap = str(await page.ask("document.getElementById('plot-latency').ariaLabel"))
            assert re.search(r"mean (3[6-9]|4[0-2]) ms", gap), gap
            assert page.complaints == []

    run(scenario())


def test_it_is_readable_on_every_screen_in_light_and_dark(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, prepare=stage_scene) as (_, page):
            pictures = {}
            for width, height in ((390, 844), (1024, 800), (1300, 900), (1600, 1000)):
                for scheme in ("light", "dark"):
                    await page.look(width=width, height=height, scheme=scheme)
                    await page.until(f"document.querySelector('#plot-al svg').viewBox.baseVal.width < {width}")
                    assert await page.ask("document.documentElement.scrollWidth") == width, "nothing to scroll sideways"
                    assert await page.ask(HIDDEN_BUTTONS) == [], (width, scheme)
                    if width > 1024:
                        assert await page.ask("document.getElementById('engines').scrollWidth") <= await page.ask(
                            "document.getElementById('engines').clientWidth"
                        ), width
                    contrast = await page.ask(CONTRAST)
                    assert contrast["text"] >= 4.5, (scheme, contrast)
                    assert contrast["line"] >= 3.0, (scheme, contrast)
                    pictures[width, scheme] = await page.screenshot(tmp_path / f"{width}-{scheme}.png")
            for (width, _scheme), picture in pictures.items():
                assert struct.unpack(">I", picture[16:20])[0] == width
            assert len(set(pictures.values())) == len(pictures), "light and dark differ"
            unnamed = "[...document.querySelectorAll('button, input, meter, [role=img]')].filter((one) => !one.ariaLabel && !one.textContent.trim() && !one.labels?.length).map((one) => one.outerHTML)"
            assert await page.ask(unnamed) == []

    run(scenario())


def test_an_operator_swaps_and_is_told_why_not(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, prepare=_two_drafts) as (rig, page):
            await confirm(page, "[data-action='activate'][data-version='1']")
            await eventually(lambda: rig.gateway.drafts.active == 1)
            assert [engine.draft_version for engine in rig.engines] == [1, 1]
            await page.until("!document.getElementById('confirm').open")
            await page.until("document.querySelector('#drafts tr.current b')?.textContent === 'v1'")

            # Somebody else swaps while the question stands: what the operator saw is no longer so.
            await page.click("[data-action='activate'][data-version='0']")
            await page.until("document.getElementById('confirm').open")
            assert (await rig.activate(2, 1)).status == 200
            await page.until("document.querySelector('#drafts tr.current b')?.textContent === 'v2'")
            await page.click("#confirm-go")
            await page.until("document.getElementById('confirm-problem').textContent")
            problem = await page.text("#confirm-problem")
            assert "the active draft is 2, the request expects 1" in problem
            assert "stale" in problem
            assert rig.gateway.drafts.active == 2
            await page.press("Escape")
            await page.until("!document.getElementById('confirm').open")

            # One question right after another: the end of the first is told while the second stands.
            await page.until("document.querySelector('[data-action=roll-back]').textContent === 'Roll back to v1'")
            await page.click("[data-action='activate'][data-version='0']")
            next_question = "document.querySelector('[data-action=roll-back]').click()"
            await page.ask(f"document.getElementById('confirm').close(); {next_question}")
            await page.until("document.getElementById('confirm').open")
            await page.click("#confirm-go")
            await eventually(lambda: rig.gateway.drafts.active == 1)

            # The floor never passed the gate, so it takes force.
            await page.until("document.querySelector('#drafts tr.current b')?.textContent === 'v1'")
            await confirm(page, "[data-action='activate'][data-version='0']")
            await page.until("document.getElementById('confirm-problem').textContent.includes('never passed the gate')")
            await page.click("#force")
            await page.click("#confirm-go")
            await eventually(lambda: rig.gateway.drafts.active == 0)

    run(scenario())


def test_an_operator_pauses_drains_and_sets_capture(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, prepare=_two_drafts) as (rig, page):
            await page.click("[data-action='pause-learner']")
            await eventually(lambda: rig.gateway.learner.is_paused)
            await page.until("document.querySelector('[data-action=resume-learner]')")
            await page.click("[data-action='resume-learner']")
            await eventually(lambda: not rig.gateway.learner.is_paused)

            await confirm(page, "[data-action='drain'][data-engine='engine-1']")
            await page.until("document.querySelector('[data-action=undrain][data-engine=engine-1]')")
            assert [engine.is_draining for engine in rig.gateway.fleet.engines] == [False, True]
            assert "draining" in await page.text("#engines")
            await page.click("[data-action='undrain']")
            await eventually(lambda: not any(engine.is_draining for engine in rig.gateway.fleet.engines))

            await page.ask("document.getElementById('capture').value = 25")
            await page.ask("document.getElementById('capture').dispatchEvent(new Event('input'))")
            await page.click("#capture-form button")
            await eventually(lambda: [engine.capture_rate for engine in rig.engines] == [0.25, 0.25])

            await rig.engines[0].stop()
            await page.until("document.querySelector('#engines .pill.bad')")
            assert "1 of 2" in await page.text("#tiles")
            await rig.engines[1].stop()
            await page.until("document.getElementById('health').textContent === 'Not ready'")
            assert "no engine is ready: engine-0:" in await page.text("#uptime")

    run(scenario())


def test_it_can_be_used_with_the_keyboard_alone(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, prepare=stage_scene) as (_, page):
            await page.ask("document.getElementById('plot-al').focus()")
            await page.press("ArrowLeft")
            await page.press("ArrowLeft")
            reading = str(await page.ask("document.getElementById('plot-reading').textContent"))
            assert "all" in reading
            assert "draft v2" in reading
            await page.ask("document.querySelector('[data-action=activate][data-version=\"1\"]').focus()")
            # Two refreshes go by and must leave the focus where it is.
            until = sum("/admin/status" in url for url in page.requested) + 3
            await eventually(lambda: sum("/admin/status" in url for url in page.requested) >= until)
            assert await page.ask("document.activeElement.dataset.version") == "1"
            await page.press("Enter")
            await page.until("document.getElementById('confirm').open")
            await page.press("Escape")
            await page.until("!document.getElementById('confirm').open")
            assert await page.ask("document.activeElement.dataset.version") == "1"

    run(scenario())


def test_it_says_since_when_there_is_no_data(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, prepare=_two_drafts) as (rig, page):
            await page.until("document.getElementById('fresh').textContent === 'live'")
            assert await page.ask("document.getElementById('stale').hidden")
            rig.stop.set()
            await page.until("!document.getElementById('stale').hidden")
            notice = await page.text("#stale")
            assert "No data since" in notice
            assert "the gateway does not answer" in notice
            assert "v0" in await page.text("#drafts"), "what was known stays"

    run(scenario())
