"""Token counts of budgets from `--budgets`: a list, or a file written by `vitwire-server budgets`."""

import json
from contextlib import suppress
from pathlib import Path

from vitwire_server.core.files import read_regular

_MOST_BYTES = 1 << 20


def token_counts(text: str) -> list[int]:
    """The token counts, ascending. Raises ValueError."""
    fault = "expected auto, learn, a list of token counts such as 64,256,1024, or an existing file"
    with suppress(OSError):  # a long list is too long for a path
        if Path(text).is_file():
            text, fault = _ladder(Path(text)), "not a file written by vitwire-server budgets"
    try:
        sizes = sorted({int(size) for size in text.strip("[]").split(",")})
    except ValueError:
        raise ValueError(fault) from None
    if sizes[0] < 1:
        raise ValueError("a budget needs at least 1 token")
    return sizes


def _ladder(path: Path) -> str:
    try:
        return ",".join(map(str, json.loads(read_regular(path, _MOST_BYTES))["budgets"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"not a file written by vitwire-server budgets: {error!r}") from None
