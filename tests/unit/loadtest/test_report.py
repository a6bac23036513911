from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
import sys
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from browser import chromium, needs_chromium
from msgspec.structs import replace
from written_run import ENDED, STEADY, request, sample, write_run

from launch.cli import main
from loadtest.measures.run_directory import RunDirectoryError
from loadtest.records import ActionRecord, EngineSample, RequestRecord, Swap, SystemSample
from loadtest.report import result, words
from loadtest.report.analysis import Analysis, analyse
from loadtest.report.compare import compare_runs
from loadtest.report.theme import NAMES

SHIFT = """
name = "shift"
what = "Code, then <chat>."
[[lane]]
name = "users"
[[lane.phase]]
name = "first"
duration_s = 60.0
arrivals = { kind = "poisson", rate_per_s = 1.0 }
traffic = { code = 1.0 }
[[lane.phase]]
name = "second"
duration_s = 60.0
arrivals = { kind = "poisson", rate_per_s = 1.0 }
traffic = { chat = 1.0 }
[slo]
ttft_ms = 400
"""


def requests(*, slow: float = 1.0, seed: int = 0, text: str = "same") -> list[RequestRecord]:
    """One a second for two minutes, code and then chat."""
    rng = np.random.default_rng(seed)
    return [
        request(
            index, at_s=float(index), ttft_s=slow * float(rng.uniform(0.2, 0.3)), gaps_s=[slow * 0.1] * 5,
            domain="code" if index < 60 else "chat", text=text, draft_version="1" if index < 90 else "2", per_chunk=2,
        )
        for index in range(120)
    ]  # fmt: skip


def samples() -> list[SystemSample]:
    """AL 2.0 on code; on chat 1.2 for half a minute, and then 1.8."""
    found: list[SystemSample] = []
    steps: dict[str, dict[str, float]] = {"code": {"1": 0.0}, "chat": {"1": 0.0, "2": 0.0}}
    accepted: dict[str, dict[str, list[float]]] = {"code": {"1": [0.0]}, "chat": {"1": [0.0], "2": [0.0]}}
    for second in range(121):
        if second:
            domain, version, share = (
                ("code", "1", 1.0) if second <= 60 else ("chat", "1", 0.2) if second <= 90 else ("chat", "2", 0.8)
            )
            steps[domain][version] += 10
            accepted[domain][version][0] += 10 * share
        swaps = [Swap(at_s=89.5, duration_s=0.5, version=2, previous=1, outcome="committed", trigger="activate")]
        found.append(
            sample(
                float(second), steps=json.loads(json.dumps(steps)), accepted=json.loads(json.dumps(accepted)),
                proposed={name: {key: 3 * value for key, value in by_version.items()} for name, by_version in steps.items()},
                completion_tokens=20.0 * second, cpu_s={"engine-0": 0.5 * second},
                engines={"engine-0": EngineSample(ready=True, draining=False, kv_usage=0.25, num_running=1.0)},
                swaps=swaps if second == 90 else [],
            )
        )  # fmt: skip
    return found


@pytest.fixture
def shift_run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", requests(), samples(), scenario=SHIFT)


@pytest.fixture(scope="module")
def shift(tmp_path_factory: pytest.TempPathFactory) -> Analysis:
    """Of a run whose directory no test changes."""
    return analyse(write_run(tmp_path_factory.mktemp("shift"), requests(), samples(), scenario=SHIFT))


@dataclass
class Reported:
    """A run that `paceline bench report` was called on."""

    path: Path
    code: int
    said: str


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Reported:
    """Something was killed in it, some requests failed, and what the server said is no markup."""
    record = replace(ENDED, actions=[ActionRecord(at_s=50.0, ended_at_s=50.1, do="kill", process="engine-0", problem=None)])
    odd = [
        replace(
            each,
            kv_path=f"<b>{each.index % 2}</b> & more",
            outcome="failed" if 50 <= each.intended_at_s < 53 else each.outcome,
        )
        for each in requests()
    ]
    path = write_run(tmp_path_factory.mktemp("reported"), odd, samples(), scenario=SHIFT, record=record)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = main(["bench", "report", str(path)])
    return Reported(path, code, said.getvalue())


def test_report_has_the_keys_of_vllm_with_their_meaning(shift: Analysis) -> None:
    report = result.result(shift)
    assert (report["completed"], report["failed"], report["num_prompts"]) == (120, 0, 120)
    assert report["label"] == "shift"
    assert report["model_id"] == "tiny"
    assert report["total_output_tokens"] == 120 * 12
    assert report["total_input_tokens"] == 1200
    assert report["duration"] == pytest.approx(119.75, abs=0.06)
    assert report["request_throughput"] == pytest.approx(120 / report["duration"])
    assert report["output_throughput"] == pytest.approx(1440 / report["duration"])
    assert report["total_token_throughput"] == pytest.approx(2640 / report["duration"])
    assert report["request_goodput"] == pytest.approx(120 / report["duration"])
    assert report["mean_tpot_ms"] == pytest.approx(500 / 11)
    assert report["p99_itl_ms"] == pytest.approx(100.0, rel=1e-3)
    assert report["max_output_tokens_per_s"] == 12.0
    assert report["spec_decode_acceptance_length"] == pytest.approx((60 * 2.0 + 30 * 1.2 + 30 * 1.8) / 120)
    assert report["spec_decode_per_position_acceptance_rates"] == pytest.approx([0.75])
    assert report["spec_decode_num_drafts"] == 1200
    assert report["spec_decode_draft_tokens"] == 3600
    assert report["spec_decode_acceptance_rate"] == pytest.approx(25.0), "in %, as vLLM has it"
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert {f"{word}_{name}_ms" for word in ("mean", "median", "std", "p50", "p90", "p95", "p99")} <= set(report)


def test_latencies_are_those_that_vllm_would_print(shift: Analysis) -> None:
    ttfts_ms = [1e3 * (record.chunk_times_s[0] - record.intended_at_s) for record in requests()]
    report = result.result(shift)
    assert report["p99_ttft_ms"] == pytest.approx(float(np.percentile(ttfts_ms, 99)), rel=1 / 1024)
    assert report["std_ttft_ms"] == pytest.approx(float(np.std(ttfts_ms)))


def test_report_command_writes_everything_and_says_what_happened(reported: Reported) -> None:
    shift_run, said = reported.path, reported.said
    assert reported.code == 0
    assert said.startswith("The run is valid.")
    assert "Shift at 60 s, code → chat: AL fell by 40 % (from 2.00 to 1.20); it rose to 95 % of the new plateau (1.80)" in said
    figures = ("over_time", "positions_over_time", "latencies", "domains", "positions", "engines")
    names = {"report.html", "report.json", "summary.json", *(f"{figure}.png" for figure in figures)}
    assert names <= {path.name for path in shift_run.iterdir()}
    for name in names:
        if name.endswith(".png"):
            assert (shift_run / name).read_bytes().startswith(b"\x89PNG")
    whole = json.loads((shift_run / "report.json").read_text())
    ours = whole.pop("paceline")
    assert json.loads((shift_run / "summary.json").read_text()) == [whole], "what vLLM's plots of sweeps look for"
    assert ours["is_valid"] is True
    assert ours["acceptance"]["by_domain"]["chat"]["acceptance_length"]["value"] == pytest.approx(1.5)
    assert ours["acceptance"]["by_version"]["2"]["acceptance_length"]["value"] == pytest.approx(1.8)
    assert ours["cost"]["cpu_s_per_token"]["value"] == pytest.approx(0.025)
    assert "25 ms of processor time a token, 66.7 ms an effective one" in said
    assert ours["shifts"][0]["recovered_after_s"] == pytest.approx(33.0, abs=1.0), "window of 1 s, smoothed over three"
    assert ours["by"]["draft_version"]["2"]["num_requests"] == 30


class Page(HTMLParser):
    """What the document refers to, and whether its tags are balanced."""

    VOID = frozenset({"meta", "br", "link", "img", "hr"})

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_needs_nothing_but_itself(reported: Reported) -> None:
    text = (reported.path / "report.html").read_text()
    found = Page()
    found.feed(text)
    assert found.open == []
    assert [link for link in found.links if not link.startswith("#")] == []
    assert "@import" not in text
    assert "url(http" not in text
    assert "<script" not in text
    assert "Code, then <chat>." in found.text, "names from a scenario are text, never markup"
    assert text.count("<svg") == 6
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"#0101[01]", text), "every stand-in for a colour is replaced"
    defined = set(re.findall(r"(--[a-z0-9-]+):", text))
    assert set(re.findall(r"var\((--[a-z0-9-]+)\)", text)) <= defined
    for name in (
        "Acceptance length (AL)",
        "Output throughput",
        "tokens per verify step",
        "draft swapped, to version",
        "By draft version",
    ):
        assert name in found.text


def test_words_of_servers_are_text_and_never_markup(reported: Reported) -> None:
    text = (reported.path / "report.html").read_text()
    assert "<b>" not in text
    found = Page()
    found.feed(text)
    assert "<b>1</b> & more" in found.text


def test_figures_take_their_colours_from_a_palette_only(shift: Analysis) -> None:
    from loadtest.report import spread_figures, theme, time_figures

    for draw in (
        time_figures.over_time,
        time_figures.positions,
        time_figures.engines,
        spread_figures.latencies,
        spread_figures.domains,
        spread_figures.positions,
    ):
        figure = draw(shift, NAMES)
        assert figure is not None
        stray = set(re.findall(r"#[0-9a-f]{6}\b", theme.as_svg(figure, "x"))) - {"#000000", "#ffffff"}
        assert not stray


def test_an_empty_run_gets_a_report_that_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "report", str(write_run(tmp_path, []))]) == 1
    assert "NOT VALID: no request was sent in the measured span" in capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["completed"] == 0
    assert report["mean_ttft_ms"] is None
    assert report["paceline"]["is_valid"] is False
    assert "no request was sent" in (tmp_path / "report.html").read_text()


def test_a_directory_without_a_run_cannot_be_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "report", str(tmp_path)]) == 2
    assert "scenario.toml is missing" in capsys.readouterr().err


def test_a_worse_run_than_the_baseline_fails_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = write_run(tmp_path / "base", requests(), scenario=SHIFT)
    slow = write_run(tmp_path / "slow", requests(slow=1.5, seed=1), scenario=SHIFT)
    same = write_run(tmp_path / "same", requests(seed=2), scenario=SHIFT)
    result.write(base / result.FILE, result.result(analyse(base)))
    assert main(["bench", "report", str(slow), "--baseline", str(base)]) == 1
    assert re.search(r"worse: TTFT p50 ×1\.[45]", capsys.readouterr().out)
    assert "Against the baseline" in (slow / "report.html").read_text()
    assert main(["bench", "report", str(same), "--baseline", str(base / "report.json")]) == 0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"completed": 3}',
        '{"paceline": {"schema_version": 99, "measures": []}}',
        '{"paceline": {"schema_version": 1, "measures": [{"name": "ttft_p50", "value": 1.0}]}}',
    ],
)
def test_a_file_that_is_no_report_is_refused_as_baseline(tmp_path: Path, text: str) -> None:
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(RunDirectoryError, match="report"):
        result.read_measures(tmp_path / "report.json")


def test_a_saved_report_gives_its_measures_back(shift: Analysis, tmp_path: Path) -> None:
    result.write(tmp_path / "report.json", result.result(shift))
    saved = result.read_measures(tmp_path / "report.json")
    assert saved.keys() == shift.headline.keys()
    assert saved["ttft_p99"] == shift.headline["ttft_p99"]


def test_positions_are_drawn_over_time_a_line_each(shift: Analysis) -> None:
    from loadtest.report import time_figures

    figure = time_figures.positions(shift, NAMES)
    assert figure is not None
    line = next(line for line in figure.axes[0].get_lines() if line.get_label() == "position 1")
    drawn = dict(zip(line.get_xdata(), line.get_ydata(), strict=True))
    assert [drawn[at_s] for at_s in (30.5, 75.5, 100.5)] == pytest.approx([100.0, 20.0, 80.0])


def test_goodput_tokens_per_chunk_and_cost_are_compared(tmp_path: Path) -> None:
    before = analyse(write_run(tmp_path / "a", requests(), samples(), scenario=SHIFT))
    few = [replace(one, chunk_token_counts=[1] * 6, num_completion_tokens=6) for one in requests()[:60]]
    after = analyse(write_run(tmp_path / "b", [*few, *requests(slow=2.0)[60:]], samples(), scenario=SHIFT))
    rows = {row.measure.name: row for row in compare_runs(before, after).rows}
    assert {"good_requests_per_s", "tokens_per_chunk", "cpu_s_per_accepted_token"} <= set(rows)
    assert (rows["tokens_per_chunk"].before, rows["tokens_per_chunk"].after) == pytest.approx((2.0, 1.5))
    assert rows["good_requests_per_s"].change.value == pytest.approx(0.5, abs=0.01), "half of them miss 400 ms"
    assert rows["cpu_s_per_accepted_token"].before == pytest.approx(60 / 900, rel=0.01)


def test_what_was_done_and_what_failed_is_in_the_picture(reported: Reported) -> None:
    found = Page()
    found.feed((reported.path / "report.html").read_text())
    assert "kill engine-0" in found.text
    assert "requests failed" in found.text
    assert "Worst window: 50 to 51 s, 1 requests, 0 % within the objectives, 1 failed." in found.text


def test_two_runs_are_compared_prompt_by_prompt(tmp_path: Path) -> None:
    before = analyse(write_run(tmp_path / "a", requests(), scenario=SHIFT))
    after = analyse(write_run(tmp_path / "b", list(reversed(requests(slow=0.9)))[:100], scenario=SHIFT))
    rows = {row.measure.name: row for row in compare_runs(before, after).rows}
    ttft = rows["ttft_p50"]
    assert ttft.num_pairs == 100
    assert ttft.change.value == pytest.approx(0.9, rel=2e-3)
    assert (ttft.change.low, ttft.change.high) == pytest.approx((0.9, 0.9), rel=4e-3), "each prompt took 0.9 times as long"
    assert ttft.verdict == "better"
    assert rows["e2e_p99"].change.value == pytest.approx(0.9, rel=2e-3)
    assert rows["itl_p50"].num_pairs is None


def test_too_few_pairs_fall_back_on_all_requests(tmp_path: Path) -> None:
    before = analyse(write_run(tmp_path / "a", requests(), scenario=SHIFT))
    others = [request(index, at_s=float(index), prompt_id=f"other{index}") for index in range(120)]
    rows = compare_runs(before, analyse(write_run(tmp_path / "b", others, scenario=SHIFT))).rows
    assert {row.num_pairs for row in rows} == {None}


def test_compare_fails_where_it_is_asked_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = str(write_run(tmp_path / "base", requests(), scenario=SHIFT))
    slow = str(write_run(tmp_path / "slow", requests(slow=1.5, text="other"), scenario=SHIFT))
    assert main(["bench", "compare", base, slow]) == 0
    said = capsys.readouterr().out
    assert re.search(r"TTFT p50 ms .*×1\.500 .* 120  worse", said)
    assert "greedy texts: 0 of 120 equal; p0 turn 0 differs at character 0" in said
    assert main(["bench", "compare", base, slow, "--fail-on-regression"]) == 1
    assert main(["bench", "compare", slow, base, "--fail-on-regression"]) == 0
    assert main(["bench", "compare", base, slow, "--lossless"]) == 1
    assert main(["bench", "compare", base, base, "--lossless", "--fail-on-regression"]) == 0
    capsys.readouterr()
    assert main(["bench", "compare", base, slow, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert "TTFT p50" in printed["worse"]
    assert printed["losslessness"]["num_different"] == 120


def test_runs_of_different_scenarios_are_told_apart_by_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = str(write_run(tmp_path / "base", requests(), scenario=SHIFT))
    same = str(write_run(tmp_path / "same", requests(seed=1), scenario=SHIFT))
    faster = SHIFT.replace("ttft_ms = 400", "ttft_ms = 500")
    assert faster != SHIFT
    other = str(write_run(tmp_path / "other", requests(), scenario=faster))
    assert main(["bench", "compare", base, same]) == 0
    assert "DIFFERENT SCENARIOS" not in capsys.readouterr().out
    assert main(["bench", "compare", base, other]) == 0
    said = capsys.readouterr().out
    assert "DIFFERENT SCENARIOS" in said
    assert "slo.ttft_ms is 400.0 in A and 500.0 in B" in said
    assert main(["bench", "compare", base, other, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scenario_differences"] == ["slo.ttft_ms is 400.0 in A and 500.0 in B"]


def test_a_run_without_a_report_is_no_baseline_and_the_message_says_how_to_make_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = write_run(tmp_path / "base", requests(), scenario=SHIFT)
    slow = write_run(tmp_path / "slow", requests(slow=1.5, seed=1), scenario=SHIFT)
    assert main(["bench", "report", str(slow), "--baseline", str(base)]) == 2
    said = capsys.readouterr().err
    assert f"{base} holds no report.json to compare with; `paceline bench report {base}` makes it" in said
    assert "Errno" not in said


def test_compare_refuses_to_believe_an_invalid_run(tmp_path: Path) -> None:
    base = str(write_run(tmp_path / "base", requests(), scenario=SHIFT))
    killed = str(write_run(tmp_path / "killed", requests(), scenario=SHIFT, record=None))
    assert main(["bench", "compare", base, killed]) == 1


def test_a_missing_matplotlib_is_named_with_its_cure(
    shift_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "report", str(shift_run)]) == 2
    assert "pip install 'paceline[bench]'" in capsys.readouterr().err
    assert main(["bench", "compare", str(shift_run), str(shift_run)]) == 0, "which draws nothing"


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (float("nan"), "–"), (0.0, "0"), (12.345, "12.3"), (4321.0, "4,321"), (2e-5, "2.00e-05")]
)
def test_numbers_for_people(value: float | None, text: str) -> None:
    assert words.number(value) == text


def test_it_is_told_how_busy_the_load_tester_was(tmp_path: Path) -> None:
    said = words.sentences(analyse(write_run(tmp_path, requests(), scenario=SHIFT, record=replace(ENDED, busy_share=0.93))))
    assert said[1].endswith("dispatch lag p99 0 ms; the load tester was busy 93 % of the time.")


def test_a_run_without_speculation_has_no_words_about_it(tmp_path: Path) -> None:
    said = words.sentences(analyse(write_run(tmp_path, requests(), scenario=STEADY)))
    assert not [line for line in said if "AL" in line]


@pytest.mark.rig
@needs_chromium
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")])
def test_the_page_is_readable_in_a_browser_and_asks_for_nothing(
    width: int, scheme: str, reported: Reported, tmp_path: Path
) -> None:
    async def look() -> None:
        url = (reported.path / "report.html").as_uri()
        async with chromium(tmp_path / "profile") as page:
            await page.look(width=width, height=900, scheme=scheme)
            await page.open(url)
            assert (page.complaints, page.requested) == ([], [url])
            assert await page.ask("document.documentElement.scrollWidth <= window.innerWidth")
            assert "shift" in await page.text("h1")
            sizes = await page.ask("[...document.querySelectorAll('svg')].map(svg => svg.getBoundingClientRect().width)")
            assert len(sizes) >= 4
            assert min(sizes) > 200
            ink, paper = [await page.ask(f"getComputedStyle(document.body).{name}") for name in ("color", "backgroundColor")]
            assert contrast(ink, paper) >= 7
            assert await page.ask("document.querySelectorAll('b, script').length") == 0
            await page.screenshot(tmp_path / "report.png")

    asyncio.run(look())


def contrast(one: str, other: str) -> float:
    """Of two colours as a browser tells them: 1 to 21 (WCAG 2, relative luminance)."""
    light, dark = sorted(map(luminance, (one, other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
