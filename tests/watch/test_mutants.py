"""Each rule is changed in turn, and its unit tests must notice every change."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from watchers import MONITORING

Document = dict[str, Any]
RULES: Document = yaml.safe_load((MONITORING / "rules.yaml").read_text(encoding="utf-8"))
TESTS: Document = yaml.safe_load(Path(__file__).with_name("rules_test.yaml").read_text(encoding="utf-8"))
NAMES = [rule.get("alert") or rule["record"] for group in RULES["groups"] for rule in group["rules"]]
THRESHOLD = re.compile(r"(?:(?<=[<>] )|(?<=[<>]= ))[\d.]*[1-9][\d.]*")
MATCHER = re.compile(r'[^{,]*(?:=~|!~|!=|=)"[^"]*",?')
OPERATOR = re.compile(r"\s(or|and|unless)\s")
FACTORS = (0.1, 10)

pytestmark = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed: make watch-test")


def names(rule: Document) -> set[str | None]:
    return {rule.get("alert"), rule.get("record")}


def mutants(rule: Document) -> Iterator[tuple[str, Document]]:
    """Changed copies of a rule, each with what was changed."""
    expression = rule["expr"]
    yield "never", rule | {"expr": f"({expression}) and on () vector(1) > 1"}
    for match in MATCHER.finditer(expression):
        yield f"without {match[0].strip()}", rule | {"expr": expression[: match.start()] + expression[match.end() :]}
    for match in OPERATOR.finditer(expression):
        yield f"before {match[1]}", rule | {"expr": expression[: match.start()]}
        if match[1] == "or":
            yield "after or", rule | {"expr": expression[match.end() :]}
    if "record" in rule:
        for factor in FACTORS:
            yield f"{factor} times", rule | {"expr": f"({expression}) * {factor}"}
        return
    yield "always", rule | {"expr": "vector(1)"}
    for match in THRESHOLD.finditer(expression):
        before, after = expression[: match.start()], expression[match.end() :]
        for bound in (f"{float(match[0]) * factor:g}" for factor in FACTORS):
            yield f"{match[0]} is {bound}", rule | {"expr": before + bound + after}
    if "for" in rule:
        amount, unit = int(rule["for"][:-1]), rule["for"][-1]
        yield "at once", {name: value for name, value in rule.items() if name != "for"}
        yield "10 times as late", rule | {"for": f"{amount * 10}{unit}"}


def with_rule(name: str, changed: Document) -> Document:
    """All rules, with one of them replaced."""
    return {
        "groups": [
            group | {"rules": [changed if name in names(rule) else rule for rule in group["rules"]]}
            for group in RULES["groups"]
        ]
    }


def survives(folder: Path, name: str, numbered: tuple[int, tuple[str, Document]]) -> str | None:
    """What was changed, if no test notices it; tests that mention the rule run first."""
    number, (what, changed) = numbered
    rules = folder / f"rules-{number}.yaml"
    rules.write_text(yaml.safe_dump(with_rule(name, changed)), encoding="utf-8")
    for place, test in enumerate(sorted(TESTS["tests"], key=lambda test: name not in str(test["promql_expr_test"]))):
        file = folder / f"test-{number}-{place}.yaml"
        file.write_text(yaml.safe_dump(TESTS | {"rule_files": [str(rules)], "tests": [test]}), encoding="utf-8")
        run = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True, check=False)
        if run.returncode:
            assert "FAILED" in run.stdout + run.stderr
            assert "error" not in (run.stdout + run.stderr).lower().replace("vitwireerrors", ""), (
                run.stdout + run.stderr
            )
            return None
    return what


@pytest.mark.parametrize("name", NAMES)
def test_every_change_of_a_rule_is_noticed(name: str, tmp_path: Path) -> None:
    (rule,) = (
        rule for group in RULES["groups"] for rule in group["rules"] if name in {rule.get("alert"), rule.get("record")}
    )
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(partial(survives, tmp_path, name), enumerate(mutants(rule)))
    assert [what for what in found if what] == []
