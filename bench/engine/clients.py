"""The client processes of a run, as their parent sees them."""

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.commands import CommandProcess
from bench.engine.answers import Answer
from bench.engine.cores import on_cores
from bench.engine.loads import Load
from bench.engine.photos import Prompts

from servers import PYTHON

_SOON = 0.3
"""Seconds that all processes have to receive the command."""
_DRAIN = 130.0
"""Seconds in which a request ends, more than `client_process.SECONDS`."""


@dataclass(frozen=True, slots=True)
class Clients:
    """Sends streams of requests."""

    processes: Sequence[CommandProcess]
    """Each runs `bench/engine/client_process.py`."""
    folder: Path
    """Where each process writes what came of its requests, in a file named after its process id."""

    @property
    def pids(self) -> list[int]:
        return [each.pid for each in self.processes]

    def prepared(self, prompts: Prompts, count: int, load: Load) -> None:
        """Begin to make the bodies of a stream."""
        sharing = self._sharing(load)
        for part, each in enumerate(sharing):
            each.send(prepare={"prompts": asdict(prompts), "count": count, "part": part, "parts": len(sharing)})

    def ran(self, urls: Sequence[str], load: Load, label: str, seconds: float) -> list[Answer]:
        """Send the stream that was prepared, in at most about `seconds`. Raises ClientFailed."""
        sharing = self._sharing(load)
        for each in sharing:
            each.answer()
        in_flight = int(load.amount) // len(sharing)
        at = time.monotonic() + _SOON
        run = {"urls": list(urls), "load": str(load), "in_flight": in_flight, "at": at, "label": label}
        for each in sharing:
            each.send(run=run, answers=str(self.folder / str(each.pid)))
        rows = []
        for each in sharing:
            each.answer(seconds + _DRAIN)
            rows += json.loads((self.folder / str(each.pid)).read_text(encoding="utf-8"))
        return sorted((Answer(**row) for row in rows), key=lambda each: each.start)

    def _sharing(self, load: Load) -> Sequence[CommandProcess]:
        """All processes, or one if they cannot have equally many requests in flight."""
        return self.processes if not load.closed or load.amount % len(self.processes) == 0 else self.processes[:1]


@contextmanager
def clients(count: int, cores: Sequence[int]) -> Iterator[Clients]:
    """Client processes, which end with the block."""
    with tempfile.TemporaryDirectory(prefix="answers-") as folder, ExitStack() as stack:
        with on_cores(cores):
            words = (PYTHON, "-m", "bench.engine.client_process")
            started = [stack.enter_context(CommandProcess(*words)) for _ in range(count)]
        yield Clients(started, Path(folder))
