"""Stands in for the process of a seat of the engine bench. Imports little, as each process that is spawned does."""

import os
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

from bench.engine.seat import Failed


def answering(pipe: Connection, place: Any) -> None:
    """A process that answers what it is asked, until it is asked for something else."""
    pipe.send({"index": place.index, "child": _sleeper(place)})
    while True:
        try:
            message = pipe.recv()
        except EOFError:
            time.sleep(600 if place.index == 9 else 0)
            return
        if message == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if message == "hang":
            time.sleep(600)
        pipe.send(Failed("it did not work") if message == "fail" else message)


def _sleeper(place: Any) -> int:
    """A descendant of a process that does not end by itself."""
    if place.index != 9:
        return 0
    return os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "600")
