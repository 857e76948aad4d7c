"""A process that matches an adapter's regular expressions: some would match for years."""

import re

from vitwire_children.serving import Fault, NotDone, serve

_BYTES = 1 << 30
"""Memory for a match."""


def _first_matches(job: tuple[list[str], list[str]]) -> list[int | None]:
    """For each dotted name, the first pattern that matches the end of it, by PEFT's rule. Raises NotDone."""
    patterns, names = job
    try:
        compiled = [re.compile(rf"(.*\.)?({pattern})$") for pattern in patterns]
        return [next((at for at, each in enumerate(compiled) if each.match(name)), None) for name in names]
    except (re.error, RecursionError, OverflowError) as error:
        reason = f"it is not a regular expression that can be matched ({type(error).__name__}: {error})"
        raise NotDone(Fault.MALFORMED, reason) from None


if __name__ == "__main__":
    serve(lambda: lambda _: (_first_matches, _BYTES))
