"""Files on file systems that may hang: they are read in threads that nobody waits for."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import TypeVar

from vitwire.shared.named_files import UnusableFile
from vitwire_server.config.settings import UsageError

_log = logging.getLogger(__name__)
T = TypeVar("T")
_LOOK_SECONDS = 1.0
_SILENT_SECONDS = 10.0


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
    except UnusableFile as error:  # it names its flag
        raise UsageError(str(error)) from error
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
