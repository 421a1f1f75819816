"""The alert rules and the dashboard: each names metrics and labels that exist, and each expression parses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.promql import read

from tierd.daemon.http.openmetrics import FAMILIES, sample_names

SYSTEMD = Path(__file__).parents[3] / "systemd"
RULES = (SYSTEMD / "alerts.yml").read_text()
DASHBOARD = json.loads((SYSTEMD / "grafana.json").read_text())
KNOWN = {sample: family for name, family in FAMILIES.items() for sample in sample_names(name)}
FOREIGN = {"up": ("job",), "process_resident_memory_bytes": ("job",)}  # Prometheus' own, and prometheus_client's
EXPRESSIONS = [
    *re.findall(r"^        expr: (.+)$", RULES, re.M),
    *(target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]),
]
_EACH = ("instance", "job")  # labels that Prometheus adds


def faults(expression: str) -> list[str]:
    """What an expression names that does not exist, or uses as its type does not allow."""
    try:
        found = read(expression)
    except ValueError as error:
        return [str(error)]
    wrong = []
    for name, labels, function in found.metrics:
        if name in FOREIGN:
            wrong += [f"{name} has no {label}" for label in labels if label not in (*FOREIGN[name], *_EACH)]
        elif name not in KNOWN:
            wrong.append(f"no metric {name}")
        else:
            wrong += [f"{name} has no {label}" for label in labels if label not in (*KNOWN[name].labels, *_EACH)]
            counts = KNOWN[name].kind != "gauge"
            if counts != (function in ("rate", "increase")):
                wrong.append(f"{name}: {'of a counter only the rate says anything' if counts else 'no counter'}")
    known = {*_EACH, *(label for name, _, _ in found.metrics if name in KNOWN for label in KNOWN[name].labels)}
    return wrong + [f"no label {label}" for label in sorted(found.grouped - known)]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_metrics_and_labels_of_each_expression_exist(expression: str) -> None:
    assert faults(expression) == []


@pytest.mark.parametrize(
    "expression",
    [
        "tierd_saved_total > 0",
        "tierd_saves_total > 0",
        "rate(tierd_saves_total) > 0",
        "tierd_saves_total[5m] > 0",
        "rate(tierd_pending_parts[5m])",
        'tierd_trainers{run="a"}',
        "sum by (tier) (tierd_trainers)",
        "sum by (run (tierd_pending_parts)",
        "tierd_trainers >",
        "(tierd_trainers",
        "tierd_trainers) > 1",
        "tierd_trainers{instance=a}",
        "rat(tierd_saves_total[5m])",
        "tierd_trainers and",
        "tierd_flush_seconds > 1",
        "",
    ],
)
def test_planted_mistake_in_an_expression_is_detected(expression: str) -> None:
    assert faults(expression)


def test_every_rule_is_whole() -> None:
    """As far as lines tell: each rule has its members once, and nothing stands outside of one."""
    rules = RULES.split("      - alert: ")[1:]
    assert len(rules) >= 8 and len(EXPRESSIONS) >= len(rules)
    names = [rule.split("\n")[0] for rule in rules]
    assert len(set(names)) == len(names) and all(re.fullmatch(r"Tierd[A-Za-z]+", name) for name in names)
    for rule in rules:
        members = re.findall(r"^        ([a-z]+):", rule, re.M)
        assert [one for one in members if one != "for"] == ["expr", "labels", "annotations"], rule
        assert re.search(r"labels: \{ severity: (page|ticket) \}", rule)
        texts = re.findall(r"^          (summary|description): \"([^\"]+)\"$", rule, re.M)
        assert [name for name, _ in texts] == ["summary", "description"], rule
        (expression,) = re.findall(r"^        expr: (.+)$", rule, re.M)
        kept = {label for _, label in re.findall(r"(\$labels)\.([a-z]+)", rule)}
        by = re.search(r"\bby \(([a-z, ]+)\)", expression)
        assert kept <= (set(by[1].split(", ")) if by else {"instance", "run", "tier"}), rule


def test_dashboard_has_the_shape_that_grafana_imports() -> None:
    assert {"title", "uid", "schemaVersion", "templating", "panels"} <= set(DASHBOARD)
    variables = {one["name"]: one for one in DASHBOARD["templating"]["list"]}
    for one in variables.values():
        if one["type"] == "query":
            metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", one["query"]).groups()
            assert label in (*KNOWN[metric].labels, *_EACH)
    taken: set[tuple[int, int]] = set()
    for number, panel in enumerate(DASHBOARD["panels"], 1):
        assert panel["id"] == number and panel["targets"] and panel["type"] in ("timeseries", "stat")
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24
        taken |= cells
        for target in panel["targets"]:
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= set(variables)
            by = re.search(r"\bby \(([a-z, ]+)\)", target["expr"])
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert shown <= (set(by[1].split(", ")) if by else {"instance"}), panel["title"]


def test_the_dashboard_shows_all_that_a_node_owner_needs() -> None:
    named = {name for expression in EXPRESSIONS for name, _, _ in read(expression).metrics}
    left = {name for name in FAMILIES if not {*sample_names(name)} & named}
    assert left <= {
        "tierd_build_info", "tierd_runs", "tierd_pruned_copies_total", "tierd_tier_failed_tries", "tierd_alerts_total",
        "tierd_problems", "tierd_spool_parts", "tierd_scrubbed_bytes_total", "tierd_notifications_total",
    }  # fmt: skip
