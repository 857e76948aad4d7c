"""Regular expressions of a file, matched by a process of bounded time and memory: some match for years."""

import json
import subprocess
import sys
from collections.abc import Sequence

_SECONDS = 5
"""Of the processor, so a busy machine takes nothing from it."""
_BYTES = 1 << 30
_PROGRAM = f"""
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({_BYTES}, {_BYTES}))
resource.setrlimit(resource.RLIMIT_CPU, ({_SECONDS}, {_SECONDS}))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
patterns, names = json.load(sys.stdin)
try:
    compiled = [re.compile(rf"(.*\\.)?({{pattern}})$") for pattern in patterns]
    found = [next((at for at, each in enumerate(compiled) if each.match(name)), None) for name in names]
except (re.error, MemoryError, RecursionError, OverflowError) as error:
    sys.exit(f"it is no regular expression that can be matched ({{type(error).__name__}}: {{error}})")
json.dump(found, sys.stdout)
"""


def first_matches(patterns: Sequence[str], names: Sequence[str]) -> list[int | None]:
    """For each dotted name, which pattern is the first to match the end of it, by PEFT's rule.

    Raises ValueError over patterns that do not end, or are none.
    """
    ran = subprocess.run(  # noqa: S603 - the program above
        [sys.executable, "-I", "-S", "-c", _PROGRAM],
        input=json.dumps([patterns, names]),
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode < 0:
        raise ValueError(f"it does not match within {_SECONDS} s of processor time")
    if ran.returncode:
        raise ValueError(ran.stderr.strip().rpartition("\n")[2])
    found: list[int | None] = json.loads(ran.stdout)
    return found
