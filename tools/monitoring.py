"""Files of deploy/monitoring that follow from others: the PrometheusRule from rules.yaml, the dashboard from panels.py.

`python -m tools.monitoring` writes them, `--check` only reports which are out of date. `--docs URL` first sets where
the alerts of rules.yaml lead: to URL/operations/alerts.md.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import yaml
from tools.panels import ROWS, Panel

Document: TypeAlias = dict[str, Any]
"""A JSON object in another program's format."""

FOLDER = Path(__file__).parents[1] / "deploy" / "monitoring"
_HEADER = "# Made by tools/monitoring.py from rules.yaml.\n"
_RUNBOOK = re.compile(r"runbook_url: \S+/operations/alerts\.md#")
_COLUMNS, _HEIGHT = 24, 8
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


class _Dumper(yaml.SafeDumper):
    """Indents lists, and writes expressions of several lines as blocks."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002 - its signature
        return super().increase_indent(flow, False)


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def prometheus_rule() -> str:
    """The rules as an object of the Prometheus operator."""
    rules = yaml.safe_load((FOLDER / "rules.yaml").read_text(encoding="utf-8"))
    labels = {"app.kubernetes.io/name": "vitwire", "app.kubernetes.io/instance": "vitwire"}
    document = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "vitwire", "labels": labels},
        "spec": rules,
    }
    return _HEADER + yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=106)


def dashboard() -> str:
    """The dashboard as Grafana imports it."""
    document = {
        "title": "Vitwire",
        "uid": "vitwire",
        "tags": ["vitwire"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [_datasource(), _variable("job", 'job=~".*vitwire.*"'), _variable("instance", 'job=~"$job"')]
        },
        "panels": [{"id": number, **panel} for number, panel in enumerate(_panels(), 1)],
    }
    return json.dumps(document, indent=2) + "\n"


def _panels() -> Iterator[Document]:
    y = 0
    for row in ROWS:
        yield {
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "panels": [],
            "gridPos": _place(0, y, _COLUMNS, 1),
        }
        y += 1
        width = _COLUMNS // 3
        for number, panel in enumerate(row.panels):
            yield _panel(panel, _place(number % 3 * width, y + number // 3 * _HEIGHT, width, _HEIGHT))
        y += -(-len(row.panels) // 3) * _HEIGHT


def _panel(panel: Panel, place: Document) -> Document:
    targets = [
        {"refId": chr(ord("A") + number), "datasource": _DATASOURCE, "expr": query.expression,
         "legendFormat": query.legend}
        for number, query in enumerate(panel.queries)
    ]  # fmt: skip
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": targets,
    }


def _place(x: int, y: int, width: int, height: int) -> Document:
    return {"x": x, "y": y, "w": width, "h": height}


def _datasource() -> Document:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _variable(label: str, selector: str) -> Document:
    return {
        "name": label,
        "type": "query",
        "datasource": _DATASOURCE,
        "query": f"label_values(up{{{selector}}}, {label})",
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


FILES: Mapping[str, Callable[[], str]] = {"prometheusrule.yaml": prometheus_rule, "dashboard.json": dashboard}
"""How each file is made."""


def stale() -> list[str]:
    """Names of the files that are out of date or missing."""
    return [
        name
        for name, make in FILES.items()
        if not (FOLDER / name).exists() or (FOLDER / name).read_text(encoding="utf-8") != make()
    ]


def document_at(docs: str) -> None:
    """Let the alerts lead to the runbooks in the folder of documents at this URL."""
    rules = FOLDER / "rules.yaml"
    text = rules.read_text(encoding="utf-8")
    rules.write_text(
        _RUNBOOK.sub(lambda _: f"runbook_url: {docs.rstrip('/')}/operations/alerts.md#", text), encoding="utf-8"
    )


def _absolute(url: str) -> str:
    if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", url):
        raise argparse.ArgumentTypeError(f"{url!r} is not an absolute http or https URL")
    return url


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files, or check them; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="only report which files are out of date")
    parser.add_argument("--docs", type=_absolute, metavar="URL", help="where the folder docs/ is published")
    given = parser.parse_args(arguments)
    if given.docs:
        document_at(given.docs)
    names = stale()
    for name in names:
        if given.check:
            print(f"deploy/monitoring/{name} is out of date, run python -m tools.monitoring")
        else:
            (FOLDER / name).write_text(FILES[name](), encoding="utf-8")
            print(f"deploy/monitoring/{name} written")
    return int(bool(names) and given.check)


if __name__ == "__main__":
    sys.exit(main())
