"""Signals to a process, and the limit of its file descriptors."""

import asyncio
import resource
import signal
from collections.abc import Callable
from contextlib import suppress

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_DUPLICATE_SECONDS = 0.5
"""A signal this soon after the first is a duplicate: GNU timeout signals its child and then the child's group."""
_ENOUGH = 1 << 16
_METRICS = 256
_RESERVED = 512
"""Descriptors for the metrics port, files and the runtime."""


def on_signals(first: Callable[[signal.Signals], None], second: Callable[[], None]) -> None:
    """Have the running loop call `first` with the first signal and `second` for each later one but duplicates.

    A terminal that closes may send several SIGHUP, so these are never the second. Under `nohup` SIGHUP stays ignored.
    """
    loop = asyncio.get_running_loop()
    first_at: float | None = None

    def handle(number: signal.Signals) -> None:
        nonlocal first_at
        if first_at is None:
            first_at = loop.time()
            first(number)
        elif number is not signal.SIGHUP and loop.time() - first_at >= _DUPLICATE_SECONDS:
            second()

    for number in STOPPING:
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, handle, number)


def raise_limit() -> None:
    """Raise the soft limit to the hard limit, at most 65,536; shells start programs with 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(_ENOUGH, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # forbidden in a sandbox: keep the soft limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def metrics_connections() -> int:
    """Maximum connections to the metrics port."""
    return min(_METRICS, _limit() // 4)


def rpc_connections() -> int:
    """Maximum gRPC connections, leaving descriptors for the metrics port and files."""
    return max(_limit() - _RESERVED, _limit() // 2)


def _limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _ENOUGH if soft == resource.RLIM_INFINITY else soft
