"""The tables of supported models in README.md and docs/models.md, from the rows that the server serves.

`python tools/models.py` writes them, `--check` only says whether they are current.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from vitwire_server.towers.families import FAMILIES
from vitwire_server.towers.family import Accepts, Family

_ROOT = Path(__file__).parents[1]
_BEGIN, _END = "<!-- models: tools/models.py -->", "<!-- /models -->"


def short_table() -> Iterator[str]:
    """Models that are taken alike share a line."""
    rows = []
    for taken, families in groupby(FAMILIES.values(), lambda row: (row.layout, row.attention, row.videos)):
        own = list(families)
        layout, attention, videos = taken
        titles = ", ".join(dict.fromkeys(row.title.partition(" (")[0] for row in own))
        types = ", ".join(f"`{row.model_type}`" for row in own)
        rows.append((titles, types, layout, attention, videos))
    return _table(("models", "model_type", "pixels", "attention", "videos"), rows)


def long_table() -> Iterator[str]:
    """One line for each row."""
    header = ("model_type", "models", "tower", "images", "videos", "graphs", "EVS", "transformers", "what is special")
    return _table(header, [_line(row) for row in FAMILIES.values()])


def _line(row: Family) -> tuple[str, ...]:
    return (
        f"`{row.model_type}`",
        row.title,
        ", ".join(filter(None, (row.architecture, row.layout, f"attention {row.attention}"))),
        row.images,
        row.videos,
        "yes",
        "yes" if row.videos is not Accepts.NOTHING and row.prunes else "no",
        row.transformers,
        row.special,
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield f"|{'---|' * len(header)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


TABLES: dict[str, Callable[[], Iterator[str]]] = {"README.md": short_table, "docs/models.md": long_table}


def current(name: str) -> str:
    """The file with its table as the rows have it. Raises ValueError where the marks are missing."""
    before, begin, rest = (_ROOT / name).read_text(encoding="utf-8").partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not (begin and end):
        raise ValueError(f"{name} has no place for the table between {_BEGIN} and {_END}")
    return "".join([before, _BEGIN, "\n", *(f"{line}\n" for line in TABLES[name]()), _END, after])


def main() -> int:
    """Write the tables, or check them; returns the exit code."""
    stale = [name for name in TABLES if (_ROOT / name).read_text(encoding="utf-8") != current(name)]
    if "--check" in sys.argv[1:]:
        for name in stale:
            print(f"{name}: the table of models is not current, run tools/models.py")
        return int(bool(stale))
    for name in stale:
        (_ROOT / name).write_text(current(name), encoding="utf-8")
        print(f"{name} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
