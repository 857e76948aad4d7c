"""How heavy the product is: lines of each room, long functions, many parameters, large classes.

`python tools/weight.py` prints a table of client, gateway and server, without generated stubs. With `--check` it exits
with 1 if something is above its ceiling. A ceiling changes only by an issue that names the new number.
"""

import ast
import re
import sys
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
CEILINGS = {
    "product": 52_450,  # 50,800; 300 for one GPU, 400 for new users, 400 for the latest towers, 600 for clips
    "tests": 54_600,  # to come down to 52,000
    "bench": 5_500,
    "docs/performance": 1_000,
    "broad excepts": 30,
    "ANN401": 40,
    "noqa": 200,
}
"""Lines, but for the last three: how often the product has them."""
_BROAD = re.compile(r"^\s*except \(?.*\b(Base)?Exception\b", re.MULTILINE)
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


def weights(product: Sequence[Source]) -> dict[str, int]:
    """What the ceilings bound."""
    texts = [source.path.read_text(encoding="utf-8") for source in product]

    def count(pattern: str | re.Pattern[str]) -> int:
        return sum(len(re.findall(pattern, text)) for text in texts)

    return {
        "product": sum(source.lines for source in product),
        "tests": lines_below("tests", "*.py"),
        "bench": lines_below("bench", "*.py"),
        "docs/performance": lines_below("docs/performance", "*.md"),
        "broad excepts": count(_BROAD),
        "ANN401": count(r"# noqa:.*\bANN401"),
        "noqa": count("# noqa"),
    }


def lines_below(folder: str, pattern: str) -> int:
    """Lines of all files of a folder whose names match."""
    return sum(path.read_text(encoding="utf-8").count("\n") for path in (ROOT / folder).rglob(pattern))


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
    """Print the table, or check the ceilings."""
    found = list(sources())
    if "--check" in sys.argv[1:]:
        over = {name: weight for name, weight in weights(found).items() if weight > CEILINGS[name]}
        sys.exit("\n".join(f"{name}: {weight:,}, at most {CEILINGS[name]:,}" for name, weight in over.items()) or 0)
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
    for name, weight in weights(found).items():
        print(f"{name}: {weight:,} of {CEILINGS[name]:,}")
    show(f"functions of more than {MOST_LINES} lines", [name for each in found for name in long_functions(each)])
    show(f"more than {MOST_PARAMETERS} parameters", [name for each in found for name in many_parameters(each)])
    show(f"classes of more than {MOST_METHODS} methods", [name for each in found for name in large_classes(each)])


def show(title: str, names: Sequence[str]) -> None:
    """Print how many there are, and which."""
    print(f"{len(names)} {title}: {', '.join(names)}")


if __name__ == "__main__":
    main()
