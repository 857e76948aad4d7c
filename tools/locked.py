"""Select from requirements.lock what an installation of Vitwire needs: `tools/locked.py --variant cpu server,cli`.

The output is a requirements file with hashes, to be installed with `pip install --require-hashes --no-deps`. Only the
standard library is used, since the builder of the image runs it before anything is installed.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LOCK = Path("requirements.lock")
VARIANTS = ("cpu", "cuda")
_ENTRY = re.compile(
    r"^# for: (?P<extras>[a-z0-9 ]+?)(?: \((?P<variant>cpu|cuda) only\))?\n(?P<text>(?:(?!#|\n).+\n)+)", re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One pinned package: the extras that need it, the variant it belongs to (empty: both), and its lines."""

    extras: frozenset[str]
    variant: str
    text: str


def entries(lock: str) -> Iterator[Entry]:
    """All packages of the lock, in its order."""
    for found in _ENTRY.finditer(lock):
        yield Entry(frozenset(found["extras"].split()), found["variant"] or "", found["text"])


def select(lock: str, extras: frozenset[str], variant: str) -> str:
    """The lines of what these extras need. Raises ValueError if the lock has no such extra."""
    every = list(entries(lock))
    known = frozenset().union(*(entry.extras for entry in every))
    if unknown := extras - known:
        raise ValueError(
            f"requirements.lock has no extra {', '.join(sorted(unknown))}; it has {', '.join(sorted(known))}"
        )
    return "".join(entry.text for entry in every if entry.extras & extras and entry.variant in {"", variant})


def main() -> int:
    """Print the selection; exits 2 if an extra is unknown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("extras", help="extras of pyproject.toml, separated by commas; also `client`, `build`")
    parser.add_argument("--variant", choices=VARIANTS, default="cuda", help="the build of torch (default: %(default)s)")
    parser.add_argument("--lock", type=Path, default=LOCK)
    arguments = parser.parse_args()
    extras = frozenset(filter(None, arguments.extras.split(",")))
    try:
        sys.stdout.write(select(arguments.lock.read_text(encoding="utf-8"), extras, arguments.variant))
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
