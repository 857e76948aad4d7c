"""The decoder on the model's device, which JPEG files go to."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from vitwire.wire import Buffer
from vitwire_server.core.items import Modality
from vitwire_server.preparing.files.child import Child, DecoderGone
from vitwire_server.preparing.files.messages import Decode, Decoded, Measured, Setup
from vitwire_server.preparing.files.turns import Flow, Turn, Turns, predicted

_log = logging.getLogger(__name__)
_SECONDS = 5.0
"""Of wall-clock time for a file, which takes milliseconds: it was checked, and its size is bounded."""
_LEAST_PIXELS = 1 << 19
"""Of a picture: those of 448² were decoded faster on the CPU, and those of 1920 x 1080 on the device."""
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
"""Seconds until the decoder is started again, twice as long each time."""


class DeviceDecoder:
    """One process, started ahead, and again after it ended. Used on one event loop.

    Nothing depends on it: what it does not decode is left to the others.
    """

    def __init__(self, setup: Setup, output_bytes: int, turns: Turns) -> None:
        """`turns` has one place; `setup` names the device."""
        self._setup = setup
        self._output_bytes = output_bytes
        self._turns = turns
        self._child: Child | None = None
        self._pause = _FIRST_PAUSE
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Start the process in the background."""
        self._run(self._start(0.0))

    def takes(self, found: Measured) -> bool:
        """Whether it is ready, and decodes this file as Pillow does and sooner."""
        return self._child is not None and found.orientation > 0 and found.area >= _LEAST_PIXELS

    async def decode(
        self,
        flow: Flow,
        data: Buffer,
        found: Measured,
        modality: Modality,
        reserve: Callable[[], Awaitable[memoryview]],
    ) -> Decoded | None:
        """Decode and prepare a file into what `reserve` gets once it is its turn; None if it could not."""
        turn = await self._turns.acquire(flow, predicted(found.cost))
        child = self._child
        if child is None:
            self._turns.release(turn)
            return None
        turn.begin()
        try:
            target = await reserve()
            await child.write(data)
            job = Decode(len(data), modality, _SECONDS, len(target), orientation=found.orientation)
            answer = await child.ask(job, _SECONDS)
            if not isinstance(answer, Decoded):
                return None
            await child.read(target)
        except DecoderGone as error:
            _log.debug("a file is left to other decoders: %s", error)
            return None
        finally:
            self._run(self._take_back(child, turn))
        return answer

    async def close(self) -> None:
        """End the process."""
        child, self._child = self._child, None  # so that none is started in its place
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if child:
            await child.close()

    async def _take_back(self, child: Child, turn: Turn) -> None:
        """End a turn, once a job whose RPC was cancelled is over too."""
        try:
            await child.idle()
            if child.is_alive:
                child.discard()
            elif self._child is child:
                self._child = None
                await child.close()
                _log.warning("the decoder on the device ended (exit %s); it starts again", child.process.returncode)
                self._run(self._start(self._pause))
                self._pause = min(_LONGEST_PAUSE, 2 * self._pause)
        finally:
            self._turns.release(turn)

    async def _start(self, pause: float) -> None:
        while self._child is None:
            await asyncio.sleep(pause)
            try:
                self._child = await Child.start(self._setup, self._output_bytes)
            except DecoderGone as error:
                pause = _LONGEST_PAUSE
                _log.warning("JPEG files are decoded on the CPU: the decoder on the device did not start: %s", error)
            else:
                _log.debug("the decoder on the device started: %d", self._child.process.pid)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
