"""Token counts of budgets, as `--budgets` names them: a list, or a file that `vitwire-server budgets` wrote."""

import json
from contextlib import suppress
from pathlib import Path


def token_counts(text: str) -> list[int]:
    """The token counts, ascending. Raises ValueError."""
    fault = "no such file, and neither auto nor a list of token counts such as 64,256,1024"
    with suppress(OSError):  # a long list is no path
        if Path(text).is_file():
            text, fault = _ladder(Path(text)), "the file holds no ladder of token counts"
    try:
        sizes = sorted({int(size) for size in text.strip("[]").split(",")})
    except ValueError:
        raise ValueError(fault) from None
    if sizes[0] < 1:
        raise ValueError("a budget has at least 1 token")
    return sizes


def _ladder(path: Path) -> str:
    try:
        return ",".join(map(str, json.loads(path.read_text(encoding="utf-8"))["budgets"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"the file holds no ladder: {error!r}") from None
