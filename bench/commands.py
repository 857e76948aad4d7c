"""The loop of a client process: one JSON command a line on stdin, one JSON answer a line on stdout."""

import json
import sys
from collections.abc import Callable
from typing import Any

Row = dict[str, Any]


def answer_commands(answered: Callable[[Row], Row]) -> None:
    """Until stdin is closed; a command that fails is answered by `failed` with the reason."""
    for line in sys.stdin:
        try:
            answer = answered(json.loads(line))
        except Exception as error:  # noqa: BLE001 - the parent process reports it
            answer = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
