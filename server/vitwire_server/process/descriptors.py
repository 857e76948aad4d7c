"""File descriptors: how many this process may open, and how many of them connections may take."""

import resource
from contextlib import suppress

_ENOUGH = 1 << 16
_METRICS = 256
_KEPT = 512
"""For the metrics port, for files and for the runtime."""


def raise_limit() -> None:
    """Raise the soft limit as far as it may go, up to 65,536: shells start programs with 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(_ENOUGH, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # a sandbox forbids it: the soft limit holds
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def metrics_connections() -> int:
    """How many connections the metrics port may hold."""
    return min(_METRICS, _limit() // 4)


def rpc_connections() -> int:
    """How many connections gRPC may hold, so that the metrics port and files find descriptors at any time."""
    return max(_limit() - _KEPT, _limit() // 2)


def _limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _ENOUGH if soft == resource.RLIM_INFINITY else soft
