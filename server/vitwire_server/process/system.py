"""A process and its system: signals, file descriptors, and file systems that hang."""

import asyncio
import logging
import resource
import signal
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import TypeVar

from vitwire_server.config.settings import UsageError

_log = logging.getLogger(__name__)
T = TypeVar("T")
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_DUPLICATE_SECONDS = 0.5
"""A signal this soon after the first is a duplicate: GNU timeout signals its child and then the child's group."""
_ENOUGH = 1 << 16
_METRICS = 256
_RESERVED = 512
"""Descriptors for the metrics port, files and the runtime."""
_LOOK_SECONDS = 1.0
_SILENT_SECONDS = 10.0


def on_signals(first: Callable[[], None], second: Callable[[], None]) -> None:
    """Have the running loop call `first` for the first signal and `second` for each later one but duplicates.

    A terminal that closes may send several SIGHUP, so these are never the second. Under `nohup` SIGHUP stays ignored.
    """
    loop = asyncio.get_running_loop()
    first_at: float | None = None

    def handle(number: signal.Signals) -> None:
        nonlocal first_at
        if first_at is None:
            first_at = loop.time()
            first()
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


def in_daemon_thread(call: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Run `call` in a daemon thread, which does not keep the process from exiting."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(outcome: T | Exception) -> None:
        if future.cancelled():
            return
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def run() -> None:
        outcome: T | Exception
        try:
            outcome = call()
        except Exception as error:  # noqa: BLE001 - raised again by the future
            outcome = error
        with suppress(RuntimeError):  # the loop is closed: the process is about to exit
            loop.call_soon_threadsafe(settle, outcome)

    Thread(target=run, name=name, daemon=True).start()
    return future


async def read_at_start(flags: str, read: Callable[[], T]) -> T:
    """Call `read` off the event loop.

    Raises UsageError, which names the flags, for an OSError or ValueError, and if it takes too long.
    """
    try:
        async with asyncio.timeout(_SILENT_SECONDS):
            return await in_daemon_thread(read, "reading")
    except TimeoutError:
        raise UsageError(f"{flags}: no answer from the file system for {_SILENT_SECONDS:g} s") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{flags}: {error}") from error


async def refresh_for_ever(flags: str, refresh: Callable[[], None]) -> None:
    """Call `refresh` every second, off the event loop; log when it hangs and when it no longer does."""
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        looking = in_daemon_thread(refresh, "refreshing")
        done, _ = await asyncio.wait([looking], timeout=_SILENT_SECONDS)
        if not done:
            _log.error("%s: no answer from the file system; what was read before stays in use", flags)
            await looking
            _log.warning("%s: the file system answers again", flags)
