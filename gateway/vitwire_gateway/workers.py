"""Work on what callers send that could not be bounded or ended here: it runs in processes that can be killed."""

import os
from collections.abc import Callable
from typing import Any

from vitwire.shared.fairness.places import Places
from vitwire_children.jobs import Child, Program
from vitwire_children.lending import Pool
from vitwire_children.serving import Fault, NotDone
from vitwire_gateway.api_errors import ApiError
from vitwire_gateway.callers import Caller

_FEWEST, _MOST = 3, 8
_WORK_SECONDS = 10.0
"""Processor time of one job."""
_WALL_SECONDS = 120.0
_PIXEL_BYTES, _BODY_BYTES = 8, 12
"""Memory that reading takes, for each pixel of an image or byte of a body; Pillow opens a WebP with two canvases."""


def memory_for(pixels: int, body_bytes: int) -> int:
    """Memory that a worker needs for the largest image or body."""
    return (256 << 20) + max(_PIXEL_BYTES * pixels, _BODY_BYTES * body_bytes)


class _Worker(Child):
    noun = "worker"
    error = ApiError


class Workers:
    """Processes that are started as they are needed. Each caller gets its share of their time.

    module: imports the jobs with all that they use. memory: bytes that each process may use for a job.
    """

    def __init__(self, module: str, memory: int) -> None:
        program = Program("vitwire_gateway.worker_process", [module, memory])
        most = max(_FEWEST, min(_MOST, os.cpu_count() or 1))
        self._places = Places(most)
        self._pool = Pool(lambda: _Worker.start(program), most)
        self.close = self._pool.close

    async def run(
        self,
        caller: Caller,
        job: Callable[..., object],
        blob: bytes,
        max_bytes: int,
        *arguments: object,
        seconds: float = 0.0,
    ) -> Any:  # noqa: ANN401  # as the job returns it
        """The result of `job(blob, *arguments)`, with `max_bytes` of bytes at most. Raises ApiError.

        seconds: of processor time; by default 10.

        The job may return JSON with bytes and ApiErrors in it: tuples arrive as lists, bytes as bytearrays. A caller
        that is cancelled leaves the job at work, whose time is bounded and counts as its caller's.
        """
        place = await self._places.acquire(caller.path)
        call = (job, arguments)
        try:
            most = seconds or _WORK_SECONDS
            async with self._pool.lent(lambda: self._places.give_back(place)) as worker:
                place.begin()
                return await worker.ask(call, blob, wall=_WALL_SECONDS, seconds=most, max_bytes=max_bytes)
        except NotDone as error:
            if error.fault is Fault.LOST:
                raise ApiError(503, f"the request was not read: {error}", "router_failed") from error
            raise ApiError(400, f"reading it {error}", "too_costly") from error
