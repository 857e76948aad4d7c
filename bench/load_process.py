"""A client process of the benchmarks: one JSON command a line on stdin, one JSON answer a line on stdout.

`python -m bench.load_process '{"kind": "client", "target": "localhost:50051"}'`. Commands are `prepare` (draw distinct
images, make one call) and `run` (a number of calls, or calls until a time). Times are read from the monotonic clock,
which all processes of a machine share. `bench/client_processes.py` is the other side.
"""

import json
import sys
import time
from functools import partial

from bench.callers import AsyncioClient, Caller, Health, Raw, Row, SyncClient, Work
from bench.commands import answer_commands

from vitwire.shared import allocator
from vitwire_cli.bench.load import Pace


def _caller(kind: str, settings: Row) -> Caller:
    kinds: dict[str, type[Caller]] = {"client": SyncClient, "async": AsyncioClient, "raw": Raw, "health": Health}
    return kinds[kind](**settings)


def _ran(
    caller: Caller, in_flight: int, calls: int | None = None, stop: float = float("inf"), pause: float = 0.0
) -> Row:
    """When each call ended, and the seconds and error of each. stop: no call starts after this time."""
    ran = caller.run(Pace(in_flight, stop - time.monotonic(), calls), pause)
    return {
        "at": [ran.began + sample.done for sample in ran.samples],
        "seconds": [sample.latency for sample in ran.samples],
        "error": [sample.error for sample in ran.samples],
    }


def _answered(caller: Caller, command: Row) -> Row:
    if "prepare" in command:
        return caller.prepare(Work(**command["prepare"]))
    return _ran(caller, **command["run"])


def main() -> None:
    settings = json.loads(sys.argv[1])
    allocator.tune()  # as docs/client.md recommends for a process of many calls; for the bare client as well
    caller = _caller(settings.pop("kind"), settings)
    answer_commands(partial(_answered, caller))
    caller.close()


if __name__ == "__main__":
    main()
