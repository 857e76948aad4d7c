"""Rows of a benchmark: printed and written to a file as they are measured, and at last tables and one JSON document."""

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Row = dict[str, Any]


class Report:
    """Rows by section. What is written so far is complete at any time, so a run that is cut off keeps its rows."""

    def __init__(
        self,
        bench: str,
        out: Path | None,
        parameters: Mapping[str, Any],
        earlier: Mapping[str, Sequence[Row]] | None = None,
    ) -> None:
        """earlier: rows of a run that this one continues, by section."""
        self._document: Row = {"bench": bench, **environment(), **parameters, "skipped": []}
        self._sections = {name: list(rows) for name, rows in (earlier or {}).items() if rows}
        self._out = out
        self._began = time.monotonic()
        self._console = Console(width=200)

    def add(self, section: str, row: Row) -> Row:
        """A row was measured; returns it."""
        self._sections.setdefault(section, []).append(row)
        self._say(f"{section} " + " ".join(f"{name}={value}" for name, value in row.items()))
        self._write()
        return row

    def replace(self, section: str, rows: Sequence[Row]) -> None:
        """The rows of a section that follows from others."""
        self._sections[section] = list(rows)
        self._write()

    def note(self, name: str, value: Any) -> None:
        """A figure that belongs to no row."""
        self._document[name] = value
        self._write()

    def skip(self, what: str, reason: str) -> None:
        """A measurement was left out."""
        line = f"{what}: {reason}"
        if line not in self._document["skipped"]:
            self._document["skipped"].append(line)
            self._say(f"skipped {line}")
            self._write()

    def end(self, titles: Mapping[str, str]) -> None:
        """Print the tables of sections that have a title, and the document as the last line."""
        self.note("wall_seconds", round(time.monotonic() - self._began, 1))
        for section, rows in self._sections.items():
            show(self._console, titles.get(section, section), rows)
        for line in self._document["skipped"]:
            self._say(f"skipped {line}")
        print(json.dumps(self.document()), flush=True)

    def document(self) -> Row:
        """All that was measured so far."""
        return self._document | self._sections

    def _say(self, line: str) -> None:
        self._console.print(
            f"[{time.monotonic() - self._began:5.0f} s] {line}", markup=False, highlight=False, soft_wrap=True
        )

    def _write(self) -> None:
        if self._out:
            text = json.dumps(self.document(), indent=1) + "\n"
            part = self._out.with_name(f"{self._out.name}.part")
            part.write_text(text, encoding="utf-8")
            part.replace(self._out)


def show(console: Console, title: str, rows: Sequence[Row]) -> None:
    """Print a table, unless it has no rows."""
    if not rows:
        return
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(*(name.replace("_", "\n") for name in columns), title=title, title_justify="left")
    for row in rows:
        table.add_row(*(_cell(row.get(name, "")) for name in columns))
    console.print(table)


def environment() -> Row:
    """Where and with what a benchmark ran."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "transformers", "grpcio", "protobuf")},
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key} {count}" for key, count in value.items())
    return "" if value is None else str(value)
