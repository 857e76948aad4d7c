"""docs/troubleshooting.md quotes messages that the product has."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
_PLACE = "\0"


def texts() -> Iterator[str]:
    """Every string of the product, with a mark for what is filled in."""
    for folder in ("client", "gateway", "server"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    yield "".join(str(each.value) if isinstance(each, ast.Constant) else _PLACE for each in node.values)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def test_the_quoted_messages_exist() -> None:
    rows = re.findall(r"^\| (.+?) \|", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    quoted = {quote for row in rows for quote in re.findall(r"`([^`]+ [^`]+)`", row) if not quote.startswith("--")}
    assert len(quoted) > 15
    known = list(texts())
    assert {quote for quote in quoted if not any(quote in text for text in known)} == set()
