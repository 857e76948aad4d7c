"""Documents of `make engine-bench`: continued by a later run, merged with other sittings, compared."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.engine import goodput

Row = dict[str, Any]
SECTIONS = ("sweep", "starts", "memory", "streams", "spans")
"""What is measured; other tables follow from it."""
_PLACE = ("sitting", "start", "setup", "size", "load")
_RATIOS = ("ttft_p50_ms", "ttft_p99_ms", "itl_p99_ms", "requests_per_s", "cpu_ms")


class Unlike(ValueError):
    """Documents that do not go together."""


def read(path: Path, settings: Mapping[str, Any]) -> dict[str, list[Row]]:
    """The rows of an earlier run, by section; none without a file. Raises Unlike if its settings differ."""
    if not path.exists():
        return {}
    document = _loaded(path)
    check(str(path), document.get("settings", {}), settings)
    return {name: document.get(name, []) for name in SECTIONS}


def check(name: str, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raises Unlike that names each setting that differs."""
    differing = [
        f"{key} is {theirs.get(key)!r} there and {value!r} here"
        for key, value in ours.items()
        if theirs.get(key) != value
    ]
    if differing:
        raise Unlike(f"{name} was measured with other settings: {'; '.join(differing)}")


def merged(paths: Sequence[Path]) -> tuple[Row, dict[str, list[Row]]]:
    """Settings and rows of several documents; a row that is in several of them counts once. Raises Unlike."""
    documents = [_loaded(path) for path in paths]
    settings = documents[0].get("settings", {})
    for path, document in zip(paths, documents, strict=True):
        check(str(path), document.get("settings", {}), settings)
    found = {}
    for name in SECTIONS:
        rows = {json.dumps(row, sort_keys=True): row for document in documents for row in document.get(name, [])}
        found[name] = list(rows.values())
    return {"merged": [path.name for path in paths], "settings": settings}, found


def tables(streams: Sequence[Row]) -> dict[str, list[Row]]:
    """What follows from the streams."""
    return {"against_local": against_local(streams), "goodput": goodput.grid(streams), "sittings": sittings(streams)}


def against_local(streams: Sequence[Row]) -> list[Row]:
    """Ratios of each stream to the first one of `local` of the same sitting; `again` is the control."""
    base: dict[tuple[str, ...], Row] = {}
    for row in streams:
        if row["setup"] == "local":
            base.setdefault((row["sitting"], row["size"], row["load"]), row)
    rows = []
    for row in streams:
        local = base.get((row["sitting"], row["size"], row["load"]))
        if local is not row:
            place = {name: row[name] for name in _PLACE}
            rows.append(place | (_ratios(row, local) if local else {"not_compared": "no local in this sitting"}))
    return rows


def sittings(streams: Sequence[Row]) -> list[Row]:
    """Ratios of `local` to the first sitting's; empty with one sitting."""
    first: dict[tuple[str, str], Row] = {}
    rows = []
    for row in (row for row in streams if row["setup"] in ("local", "again")):
        other = first.setdefault((row["size"], row["load"]), row)
        if other["sitting"] != row["sitting"]:
            rows.append({name: row[name] for name in _PLACE} | _ratios(row, other))
    return rows


def _ratios(row: Row, base: Row) -> Row:
    """Null where either is not known, or requests failed."""
    if row["errors"] or base["errors"]:
        return {"not_compared": f"{row['errors']} and {base['errors']} requests failed"}
    pairs = {name: (row.get(name), base.get(name)) for name in _RATIOS}
    return {name: round(one / other, 3) if one and other else None for name, (one, other) in pairs.items()}


def _loaded(path: Path) -> Row:
    """Raises Unlike if the file is not a document of this benchmark."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Unlike(f"{path} cannot be read: {error}") from error
    if not isinstance(document, dict) or document.get("bench") != "engine":
        raise Unlike(f"{path} is not a document of make engine-bench")
    return document
