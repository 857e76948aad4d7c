"""An encoder that is stopped or killed under load."""

import signal
import time
from collections.abc import Sequence
from math import inf

import psutil
from bench.engine.answers import Answer, Row

FAULTS = {"stopped": signal.SIGSTOP, "killed": signal.SIGKILL}
"""In this order, as a killed server does not come back."""


class Fault:
    """A signal to a server once `after` requests have ended."""

    def __init__(self, pid: int, number: signal.Signals, after: int) -> None:
        self.at = inf
        """When the signal was sent, in seconds of the monotonic clock."""
        self._pid, self._number, self._left = pid, number, max(1, after)

    def count(self) -> None:
        """A request has ended."""
        self._left -= 1
        if self._left == 0:
            self.at = time.monotonic()
            send(self._pid, self._number)

    def over(self) -> None:
        """Continue a server that was stopped."""
        send(self._pid, signal.SIGCONT)


def send(pid: int, number: signal.Signals) -> None:
    """Signal a server and all its processes that still exist."""
    try:
        root = psutil.Process(pid)
        each_of = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for each in each_of:
        try:
            each.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def kill(pid: int) -> None:
    """End a process and all its descendants."""
    send(pid, signal.SIGKILL)


def outcome(answers: Sequence[Answer], at: float, local: Sequence[Answer], wait: float) -> Row:
    """How requests ended before and after a fault at `at`, in seconds of the monotonic clock.

    The router waits for the encoder for at most `wait` seconds to accept the images, and as long again to store them;
    then the engine encodes them, as it does in `local`.
    """
    before = [answer for answer in answers if answer.end < at]
    since = [answer for answer in answers if answer.end >= at]
    row: Row = {"requests": len(answers), "errors": sum(bool(answer.error) for answer in answers)}
    row |= {"ended_before": len(before), "ended_since": len(since)}
    row["longest_since_ms"] = round(1e3 * max((answer.end - answer.start for answer in since), default=0), 2)
    slowest = {"before": _slowest(before), "since": _slowest(since), "local": _slowest(local)}
    row |= {f"ttft_max_{name}_ms": value for name, value in slowest.items()}
    if slowest["since"] is None or slowest["local"] is None:
        return row | {"bound_ms": None, "within": None}
    bound = round(2e3 * wait + slowest["local"], 2)
    return row | {"bound_ms": bound, "within": slowest["since"] <= bound}


def _slowest(answers: Sequence[Answer]) -> float | None:
    """The longest time to the first token, in milliseconds; None without tokens."""
    taken = [answer.arrivals[0] - answer.start for answer in answers if answer.arrivals]
    return round(1e3 * max(taken), 2) if taken else None
