"""How heavy the product is: lines of each room, long functions, many parameters, large classes.

`python tools/weight.py` prints a table of client, gateway and server, without generated stubs.
"""

import ast
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = (
    "client/vitwire",
    "client/vitwire_children",
    "client/vitwire_cli",
    "client/vitwire_flags",
    "gateway/vitwire_gateway",
    "server/vitwire_server",
)
STUBS = "v1"
MOST_LINES, MOST_PARAMETERS, MOST_METHODS = 60, 6, 15
Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


class Source(NamedTuple):
    """A file of the product."""

    path: Path
    room: str
    lines: int
    tree: ast.Module


def sources() -> Iterator[Source]:
    """All files but stubs. A room is a package, or a package of the server or of its parts."""
    for base in PRODUCT:
        for path in sorted((ROOT / base).rglob("*.py")):
            inner = path.relative_to(ROOT / base).parts
            if STUBS not in inner:
                text = path.read_text(encoding="utf-8")
                yield Source(path, "/".join((base, *inner[:1][: len(inner) - 1])), text.count("\n"), ast.parse(text))


def long_functions(source: Source) -> Iterator[str]:
    """Names of functions with more lines than `MOST_LINES`."""
    for function in functions(source.tree):
        lines = (function.end_lineno or function.lineno) - function.lineno + 1
        if lines > MOST_LINES:
            yield f"{source.path.stem}.{function.name} ({lines})"


def many_parameters(source: Source) -> Iterator[str]:
    """Names of functions with more parameters than `MOST_PARAMETERS`, without `self`."""
    for function in functions(source.tree):
        arguments = function.args
        names = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        count = sum(name not in ("self", "cls") for name in names)
        if count > MOST_PARAMETERS:
            yield f"{source.path.stem}.{function.name} ({count})"


def large_classes(source: Source) -> Iterator[str]:
    """Names of classes with more methods than `MOST_METHODS`."""
    for each in ast.walk(source.tree):
        if isinstance(each, ast.ClassDef):
            count = sum(isinstance(part, Function) for part in each.body)
            if count > MOST_METHODS:
                yield f"{each.name} ({count})"


def functions(tree: ast.Module) -> Iterator[Function]:
    """All functions and methods."""
    return (each for each in ast.walk(tree) if isinstance(each, Function))


def main() -> None:
    """Print the table."""
    found = list(sources())
    lines, files = Counter[str](), Counter[str]()
    for source in found:
        lines[source.room] += source.lines
        files[source.room] += 1
    for room, count in lines.most_common():
        print(f"{count:7,} lines {files[room]:4} files  {room}")
    print(f"{lines.total():7,} lines {files.total():4} files")
    names = Counter(source.path.stem for source in found if source.path.stem != "__init__")
    repeated = sum(count for count in names.values() if count > 1)
    print(f"{sum(count > 1 for count in names.values())} names of {repeated} files repeat")
    show(f"functions of more than {MOST_LINES} lines", [name for each in found for name in long_functions(each)])
    show(f"more than {MOST_PARAMETERS} parameters", [name for each in found for name in many_parameters(each)])
    show(f"classes of more than {MOST_METHODS} methods", [name for each in found for name in large_classes(each)])


def show(title: str, names: Sequence[str]) -> None:
    """Print how many there are, and which."""
    print(f"{len(names)} {title}: {', '.join(names)}")


if __name__ == "__main__":
    main()
