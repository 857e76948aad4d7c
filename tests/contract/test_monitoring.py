"""Rules, PrometheusRule, dashboard and their documentation agree with each other and with the server's metrics."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest
from tools import monitoring
from tools.monitoring import stale

from vitwire_children.serving import Fault
from vitwire_gateway.metrics import Metrics as RouterMetrics
from vitwire_server.core.delivery import Fallback as DeliveryFallback
from vitwire_server.core.health import State
from vitwire_server.core.plans import Fallback
from vitwire_server.observe.metrics import Metrics

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "deploy" / "monitoring"
RULES = [rule for group in yaml.safe_load((MONITORING / "rules.yaml").read_text())["groups"] for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
RECORDS = {rule["record"] for rule in RULES if "record" in rule}
DASHBOARD = json.loads((MONITORING / "dashboard.json").read_text())
QUERIES = [each["expr"] for panel in DASHBOARD["panels"] for each in panel.get("targets", [])]
MENTIONED = re.compile(r"(?<![\w:])(?:vitwire_|process_)\w+(?![\w:])")
RECORDED = re.compile(r"\b\w+:vitwire_\w+:\w+")


@pytest.fixture(scope="module")
def exposed() -> set[str]:
    """Names of the samples of a server and of a router, those of histograms with their suffixes."""
    pages = [generate_latest(each.registry).decode() for each in (Metrics(), RouterMetrics())]
    lines = re.findall(r"^# TYPE (\w+) (\w+)$", "".join(pages), flags=re.MULTILINE)
    suffixes = {"histogram": ("_bucket", "_count", "_sum")}
    return {f"{name}{suffix}" for name, kind in lines for suffix in suffixes.get(kind, ("",))}


@pytest.fixture(scope="module")
def rendered() -> list[dict[str, Any]]:
    """What `kubectl apply -k deploy/monitoring` would send."""
    kubectl = Path(sys.executable).parent / "kubectl"
    run = subprocess.run([kubectl, "kustomize", MONITORING], capture_output=True, text=True, check=True)
    return list(yaml.safe_load_all(run.stdout))


def test_generated_files_are_current() -> None:
    assert stale() == []


def test_the_prometheus_rule_has_the_rules(rendered: list[dict[str, Any]]) -> None:
    (rule,) = (each for each in rendered if each["kind"] == "PrometheusRule")
    assert rule["apiVersion"] == "monitoring.coreos.com/v1"
    assert rule["spec"] == yaml.safe_load((MONITORING / "rules.yaml").read_text())


def test_the_config_map_has_the_dashboard(rendered: list[dict[str, Any]]) -> None:
    (config,) = (each for each in rendered if each["kind"] == "ConfigMap")
    assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(config["data"]["vitwire.json"]) == DASHBOARD


@pytest.mark.parametrize("expression", [rule["expr"] for rule in RULES] + QUERIES)
def test_expressions_use_metrics_that_exist(expression: str, exposed: set[str]) -> None:
    recorded = set(RECORDED.findall(expression))
    assert recorded <= RECORDS
    assert set(MENTIONED.findall(RECORDED.sub("", expression))) - {"process_"} <= exposed


@pytest.mark.parametrize(
    ("label", "values"),
    [
        ("reason", {*Fallback, *Fault, *DeliveryFallback, "items", "bytes", "bodies", "uploads"}),
        ("state", {state.value for state in State}),
        ("path", {"graph", "eager", "cache"}),
        ("kind", {"real", "padding"}),
    ],
)
def test_selected_values_of_labels_exist(label: str, values: set[str]) -> None:
    everything = " ".join([*(rule["expr"] for rule in RULES), *QUERIES])
    selected = re.findall(rf'\b{label}(?:=~|!=|=)"([^"]+)"', everything)
    assert {value for values in selected for value in values.split("|")} <= values


def test_alerts_are_complete() -> None:
    assert len(ALERTS) + len(RECORDS) == len(RULES), "names are unique"
    for name, rule in ALERTS.items():
        assert name.startswith("Vitwire")
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert (
            rule["annotations"]["runbook_url"]
            == f"https://vitwire.example.com/docs/operations/alerts.md#{name.lower()}"
        )
        assert set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])) <= {
            "instance", "job", "method", "code", "reason", "state", "process", "upstream",
        }  # fmt: skip


def test_runbooks_lead_to_where_the_documents_are_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rules.yaml").write_text((MONITORING / "rules.yaml").read_text())
    monkeypatch.setattr(monitoring, "FOLDER", tmp_path)
    assert monitoring.main(["--docs", "https://wiki.local/vitwire/"]) == 0
    for file in ("rules.yaml", "prometheusrule.yaml"):
        runbooks = re.findall(r"runbook_url:\s+(\S+)#", (tmp_path / file).read_text())
        assert runbooks == ["https://wiki.local/vitwire/operations/alerts.md"] * len(ALERTS)
    for relative in ("docs", "/docs", "https:///docs"):
        with pytest.raises(SystemExit):
            monitoring.main(["--docs", relative])


def test_every_alert_has_a_section_that_says_what_to_do() -> None:
    text = (ROOT / "docs" / "operations" / "alerts.md").read_text()
    sections = re.findall(r"^## (Vitwire\w+)\n\n.+", text, flags=re.MULTILINE)
    assert sorted(sections) == sorted(ALERTS)


def test_every_alert_fires_in_a_unit_test() -> None:
    tests = yaml.safe_load((ROOT / "tests" / "watch" / "rules_test.yaml").read_text())["tests"]
    expected = " ".join(
        sample["labels"] for test in tests for each in test["promql_expr_test"] for sample in each["exp_samples"]
    )
    assert set(re.findall(r'alertname="(\w+)"', expected)) == ALERTS.keys()


def test_tables_of_reasons_are_complete() -> None:
    """Reasons of fallbacks that an alert names have a line in its section."""
    text = (ROOT / "docs" / "operations" / "alerts.md").read_text()
    section = text.partition("## VitwireDeliveryFallsBack")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)`", section, flags=re.MULTILINE)) == {*DeliveryFallback}
    section = text.partition("## VitwireEagerFallbacks")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)`", section, flags=re.MULTILINE)) == {*Fallback} - {"graphs_off", "cheaper_eager"}


def test_panels_fill_rows_without_overlap() -> None:
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in DASHBOARD["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert max(x for x, _ in cells) < 24
    assert len(set(cells)) == len(cells)
