"""Results of the benchmark as tables."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, fields

from rich.markup import escape
from rich.table import Table

from vitwire_cli.bench.capacity import Verdict
from vitwire_cli.bench.workload import Shape


def table(document: Mapping[str, object]) -> Table:
    """Two columns: names and values. Lists of dicts are left out; they have a table of their own."""
    shown = Table(show_header=False)
    shown.add_column(style="bold")
    shown.add_column(overflow="fold")
    for name, text in rows(document):
        shown.add_row(escape(name), escape(text))
    return shown


def rows(document: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Names and values, without those that are None or empty; a dict of dicts has a row for each entry."""
    for key, value in document.items():
        name = prefix + key.replace("_", " ")
        if value in (None, "", [], {}) or (isinstance(value, list) and isinstance(value[0], dict)):
            continue
        if not isinstance(value, dict):
            yield name, _text(value)
        elif any(isinstance(each, dict) for each in value.values()):
            yield from rows(value, f"{name}: ")
        else:
            known = {inner: each for inner, each in value.items() if each is not None}
            yield name, ", ".join(f"{inner.replace('_', ' ')} {_text(each)}" for inner, each in known.items())


def list_table(entries: Sequence[Verdict] | Sequence[Shape]) -> Table:
    """Trials of a search for capacity, or what the model makes of each size; one a row."""
    shown = Table(*(each.name.replace("_", " ") for each in fields(entries[0])))
    for entry in entries:
        shown.add_row(*("" if value is None else _text(value) for value in astuple(entry)))
    return shown


def _text(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, tuple):  # a grid
        return "x".join(map(str, value))
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
