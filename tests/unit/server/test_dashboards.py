"""The Grafana dashboard and the alert rules ask only for what a gateway and its engines export.

Our names are those of a running gateway's page. vLLM's are read off the source of the installed vLLM, without importing it.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from gateway_rig import publish, run, running
from prometheus_client.parser import text_string_to_metric_families
from promql import NotPromQl, names
from sample_messages import learner_report

ROOT = Path(__file__).resolve().parents[3]
DASHBOARD = json.loads((ROOT / "ops" / "grafana" / "paceline.json").read_text())
ALERTS = yaml.safe_load((ROOT / "ops" / "prometheus" / "alerts.yml").read_text())
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
OF_PROMETHEUS = {"up"}
LABELS_OF_PROMETHEUS = {"instance", "job", "le"}
SUFFIXES = {"_counter_cls": ("_total",), "_gauge_cls": ("",), "_histogram_cls": ("_bucket", "_sum", "_count")}
VARIABLES = {"$__rate_interval": "5m", "$tenant": ".*", "$domain": ".*"}


def panels() -> Iterator[dict[str, Any]]:
    yield from (panel for panel in DASHBOARD["panels"] if panel["type"] != "row")


def expressions() -> list[str]:
    found = [target["expr"] for panel in panels() for target in panel["targets"]]
    found += [annotation["expr"] for annotation in DASHBOARD["annotations"]["list"]]
    found += [one["query"]["query"] for one in DASHBOARD["templating"]["list"] if one["type"] == "query"]
    return [_plain(expression) for expression in found + [rule["expr"] for rule in RULES]]


def _plain(expression: str) -> str:
    for variable, value in VARIABLES.items():
        expression = expression.replace(variable, value)
    # label_values(metric, label) is Grafana's own.
    return re.sub(r"label_values\((\w+), (\w+)\)", r"sum by (\2) (\1)", expression)


def vllm_metrics() -> dict[str, set[str]]:
    """Labels by sample name of every metric that vLLM's source makes by one of its metric classes."""
    spec = find_spec("vllm")
    assert spec is not None, "vLLM is not installed"
    assert spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0])
    found: dict[str, set[str]] = {}
    lists: dict[str, set[str]] = {}
    # The first hands its list of labels to the second, by the same name.
    for path in [root / "v1" / "metrics" / "loggers.py", root / "v1" / "spec_decode" / "metrics.py"]:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        for node in nodes:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and "labelnames" in node.targets[0].id:
                lists[node.targets[0].id] = _words(node.value, lists)
        for call in [node for node in nodes if isinstance(node, ast.Call)]:
            suffixes = SUFFIXES.get(call.func.attr if isinstance(call.func, ast.Attribute) else "", ())
            given = {word.arg: word.value for word in call.keywords}
            name = given.get("name")
            if isinstance(name, ast.Constant):
                found |= {f"{name.value}{suffix}": _words(given["labelnames"], lists) for suffix in suffixes}
    return found


def _words(node: ast.expr, lists: dict[str, set[str]]) -> set[str]:
    """Of a list as it is written: words, the name of another list, or a sum. None of what is computed otherwise."""
    match node:
        case ast.List():
            return {str(item.value) for item in node.elts if isinstance(item, ast.Constant)}
        case ast.BinOp():
            return _words(node.left, lists) | _words(node.right, lists)
        case ast.Name():
            return lists[node.id]
        case _:
            return set()


def exported(state_dir: Path) -> tuple[frozenset[str], frozenset[str]]:
    """Our sample names and label names, after one event of most kinds."""
    pages: list[str] = []

    async def scenario() -> None:
        async with running(state_dir, kinds=("prefill", "decode", "decode")) as rig:
            publish(rig.state_dir)
            await rig.count(rig.engine, 0, 100, (60, 20), tenant="acme", domain="code")
            await rig.complete(stream=True)
            await rig.activate(1, 0)
            rig.engine.num_dropped_rows = {"queue_full": 7}
            await rig.count(rig.engine, 1, 100, (60, 20), tenant="acme", domain="code")
            report = learner_report(loss=1.0, simulated_al=1.5, num_gate_decisions={"accepted": 1})
            await rig.admin("POST", "/admin/learner/report", data=msgspec.json.encode(report))
            pages.append((await rig.request("GET", "/metrics")).body.decode())

    run(scenario())
    sample_names: set[str] = set()
    labels: set[str] = set()
    endings = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    for family in text_string_to_metric_families(pages[0]):
        # A family without a sample yet is exported all the same, by its HELP and TYPE lines.
        sample_names |= {family.name + ending for ending in endings[family.type]}
        labels |= {label for sample in family.samples for label in sample.labels}
    return frozenset(sample_names), frozenset(labels)


def test_every_metric_asked_for_is_exported(tmp_path: Path) -> None:
    ours, _ = exported(tmp_path)
    asked = set().union(*(names(expression).metrics for expression in expressions()))
    assert len([name for name in asked if name.startswith("paceline_")]) >= 40
    assert asked - ours - set(vllm_metrics()) - OF_PROMETHEUS == set()


def test_every_label_asked_for_is_exported(tmp_path: Path) -> None:
    _, labels = exported(tmp_path)
    of_vllm = vllm_metrics()
    # Nothing pulls, fails or is dropped in that short life, so these series have no sample to show their label.
    unseen = {"end"}
    for expression in expressions():
        asked = names(expression)
        known = labels.union(LABELS_OF_PROMETHEUS, unseen, *(of_vllm.get(metric, set()) for metric in asked.metrics))
        assert asked.labels - known == set(), expression


def test_labels_of_vllm_are_read_off_its_source() -> None:
    found = vllm_metrics()
    common = {"model_name", "engine"}
    assert found["vllm:num_requests_running"] == found["vllm:inter_token_latency_seconds_bucket"] == common
    assert found["vllm:spec_decode_num_accepted_tokens_per_pos_total"] == common | {"position"}
    assert found["vllm:request_success_total"] == common | {"finished_reason"}


def test_every_value_of_a_label_asked_for_is_one_the_server_writes() -> None:
    source = "\n".join(path.read_text() for path in (ROOT / "server").rglob("*.py"))
    for expression in expressions():
        for value in re.findall(r'(?:outcome|end|phase)=~?"([^"]*)"', expression):
            for word in value.split("|"):
                assert f'"{word}"' in source, (word, expression)


def test_the_check_of_expressions_can_fail() -> None:
    for expression in ("sum(rate(a[5m])", "rate a", "sum by (x (a)", "ratee(a[5m])", "a > ?", "sum(a))", "a{b='c'}"):
        with pytest.raises(NotPromQl):
            names(expression)
    found = names('histogram_quantile(0.9, sum by (le, x) (rate(m_bucket{y=~"z|w"}[5m] offset 1h))) > 1e3 and on (x) up == 0')
    assert (found.metrics, found.labels) == ({"m_bucket", "up"}, {"le", "x", "y"})
    assert {
        "vllm:num_requests_running",
        "vllm:generation_tokens_total",
        "vllm:inter_token_latency_seconds_bucket",
    } <= set(vllm_metrics())


def test_panels_have_a_title_a_description_and_a_place_of_their_own() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    for panel in panels():
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["datasource"]["uid"] == "${datasource}", "any Prometheus may be chosen"


def test_alerts_say_what_is_wrong_and_what_to_look_at() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule["labels"]["severity"] in {"page", "ticket"}
        assert set(rule["annotations"]) == {"summary", "description"}
