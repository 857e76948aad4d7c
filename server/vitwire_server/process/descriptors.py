"""File descriptors: the limit of this process and the shares for connections."""

import resource
from contextlib import suppress

_ENOUGH = 1 << 16
_METRICS = 256
_RESERVED = 512
"""Descriptors for the metrics port, files and the runtime."""


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
