"""Tables in docs/ that follow from the code: models, flags, metrics.

`python tools/tables.py` writes them, `--check` only reports which are out of date.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from functools import partial
from pathlib import Path
from typing import Any

from packaging.version import Version
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from vitwire.integrations.transformers._layouts import LAYOUTS, tower_type
from vitwire_gateway.gateway_settings import MIB, RouterSettings
from vitwire_gateway.metrics import Metrics as RouterMetrics
from vitwire_server.config.settings import ServeSettings
from vitwire_server.observe.metrics import Metrics
from vitwire_server.towers.family import TESTED, Accepts, Family
from vitwire_server.towers.registry import FAMILIES

_ROOT = Path(__file__).parents[1]
UNWRITTEN = "?"
"""In the table of models, the tower of a row that nobody has described yet."""
_BYTES = ("_bytes", "_memory")
_GIB = 1 << 30


def long_table() -> Iterator[str]:
    """One line for each row. What only readers need, a tower's sizes and what is special, is written in the file."""
    header = (
        "model_type",
        "models",
        "pixels",
        "tower",
        "images",
        "videos",
        "graphs",
        "EVS",
        "transformers",
        "attach",
        "what is special",
    )
    written = dict(_written())
    return _table(header, [_line(row, *written.get(_key(row), (UNWRITTEN, ""))) for row in FAMILIES.values()])


def _written() -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    """By `model_type` and title, a row's tower and what is special about it, as the file has them."""
    for line in (_ROOT / "docs/models.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if line.startswith("| `") and len(cells) == 11:
            yield (cells[0], cells[1]), (cells[3], cells[10])


def _key(row: Family) -> tuple[str, str]:
    return f"`{row.model_type}`", row.title


def _line(row: Family, tower: str, special: str) -> tuple[str, ...]:
    return (
        *_key(row),
        row.layout,
        tower,
        row.images,
        row.videos,
        "yes",
        "yes" if row.videos is not Accepts.NOTHING and row.prunes else "no",
        row.transformers,
        "yes" if tower_type(row.model_type) in LAYOUTS else "no",
        special,
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield f"|{'---|' * len(header)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def releases_table() -> Iterator[str]:
    """The releases of transformers that every model is tested with."""
    return _table(("transformers", "models"), [(release, str(_served_by(release))) for release in TESTED])


def _served_by(release: str) -> int:
    return sum(Version(row.transformers) <= Version(release) for row in FAMILIES.values())


def flags_table(kind: type) -> Iterator[str]:
    """One line for each setting of a command."""
    return _table(("flag", "default", "meaning"), [_flag(each) for each in fields(kind) if each.metadata])


def _flag(setting: "Field[Any]") -> tuple[str, str, str]:
    option, name = setting.metadata["option"], setting.name.replace("_", "-")
    off = f", `--no-{name}`" if isinstance(setting.default, bool) and not option.param_decls else ""
    return f"`--{name}`{off}", _default(setting.name, setting.default), option.help.replace("|", "\\|")


def _default(name: str, value: object) -> str:
    if value is None or value is MISSING or value == ():
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if name.endswith(_BYTES) and isinstance(value, int) and value and value % MIB == 0:
        return f"{value >> 30} GiB" if value % _GIB == 0 else f"{value >> 20} MiB"
    return f"{value:g}" if isinstance(value, float) else str(value)


def metrics_table() -> Iterator[str]:
    """One line for each metric of a server, by name."""
    return _metrics_of(Metrics().registry)


def router_metrics_table() -> Iterator[str]:
    """One line for each metric of a router, by name."""
    return _metrics_of(RouterMetrics().registry)


def _metrics_of(registry: CollectorRegistry) -> Iterator[str]:
    collectors: dict[str, Any] = registry._names_to_collectors  # noqa: SLF001 - the only place that has the labels
    rows = [
        (f"`{_exposed(metric)}{_labels(collectors[metric.name])}`", metric.type, metric.documentation.rstrip("."))
        for metric in sorted(registry.collect(), key=lambda metric: metric.name)
        if metric.name.startswith("vitwire_")
    ]
    return _table(("metric", "type", "meaning"), rows)


def _exposed(metric: Metric) -> str:
    return f"{metric.name}_total" if metric.type == "counter" else metric.name


def _labels(collector: Any) -> str:  # noqa: ANN401 - prometheus_client's collectors share no class
    names = getattr(collector, "_labelnames", ())
    return f"{{{','.join(names)}}}" if names else ""


TABLES: Mapping[tuple[str, str], Callable[[], Iterator[str]]] = {
    ("docs/models.md", "models"): long_table,
    ("docs/models.md", "releases"): releases_table,
    ("docs/configuration.md", "flags"): partial(flags_table, ServeSettings),
    ("docs/metrics.md", "metrics"): metrics_table,
    ("docs/router.md", "flags"): partial(flags_table, RouterSettings),
    ("docs/router.md", "metrics"): router_metrics_table,
}


def current(file: str, table: str) -> str:
    """The file with its table as the code has it. Raises ValueError where the marks are missing."""
    begin, end = f"<!-- {table}: tools/tables.py -->", f"<!-- /{table} -->"
    before, found, rest = (_ROOT / file).read_text(encoding="utf-8").partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"{file} has no place for the table between {begin} and {end}")
    return "".join([before, begin, "\n", *(f"{line}\n" for line in TABLES[file, table]()), end, after])


def main() -> int:
    """Write the tables, or check them; returns the exit code."""
    stale = [
        (file, table) for file, table in TABLES if (_ROOT / file).read_text(encoding="utf-8") != current(file, table)
    ]
    for file, table in stale:
        if "--check" in sys.argv[1:]:
            print(f"{file}: the table of {table} is out of date, run tools/tables.py")
        else:
            (_ROOT / file).write_text(current(file, table), encoding="utf-8")
            print(f"{file} written")
    unwritten = [row.name for row in FAMILIES.values() if dict(_written()).get(_key(row), (UNWRITTEN,))[0] == UNWRITTEN]
    if unwritten:
        print(f"docs/models.md: describe the tower of {', '.join(unwritten)}, in place of {UNWRITTEN}")
    return int(bool(unwritten) or (bool(stale) and "--check" in sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
