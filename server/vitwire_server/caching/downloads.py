"""Copies of rows from the device to the host, in a separate thread."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread

from vitwire_server.caching.cache import Fetching
from vitwire_server.core.delivery import DeviceRows
from vitwire_server.core.errors import EncodeFailed

_log = logging.getLogger(__name__)


class Downloads:
    """Copies rows one by one; those that are asked for again in the meantime are copied once.

    Used on the event loop that it was created on, which calls `done` later.
    """

    def __init__(self, copied: Callable[[int], None] = lambda _: None) -> None:
        """`copied` is called with the bytes of each copy."""
        self._copied = copied
        self._loop = asyncio.get_running_loop()
        self._wanted: dict[DeviceRows, list[Fetching]] = {}
        self._queue: SimpleQueue[DeviceRows] = SimpleQueue()
        self._thread: Thread | None = None

    def start(self, rows: DeviceRows, done: Fetching) -> None:
        """Copy rows; `done` gets the copy, or an error."""
        if rows in self._wanted:
            self._wanted[rows].append(done)
            return
        self._wanted[rows] = [done]
        self._queue.put(rows)
        if self._thread is None:
            self._thread = Thread(target=self._run, name="downloads", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            self._copy_next()

    def _copy_next(self) -> None:
        """Nothing of this refers to the rows while the thread waits for the next: their memory is free then."""
        rows = self._queue.get()
        fetched: memoryview | EncodeFailed
        try:
            fetched = rows.download()
        except Exception as error:  # noqa: BLE001 - CUDA's, or no memory on the host: the items that need the copy fail
            _log.warning("an embedding cannot be copied to the host: %r", error)
            fetched = EncodeFailed("the embedding cannot be copied from the device to the host")
        with suppress(RuntimeError):  # the loop is closed: the process is about to exit
            self._loop.call_soon_threadsafe(self._settle, rows, fetched)

    def _settle(self, rows: DeviceRows, fetched: memoryview | EncodeFailed) -> None:
        if not isinstance(fetched, EncodeFailed):
            self._copied(len(fetched))
        for done in self._wanted.pop(rows):
            done(fetched)
