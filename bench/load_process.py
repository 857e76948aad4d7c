"""A client process of the benchmarks: one JSON command a line on stdin, one JSON answer a line on stdout.

`python -m bench.load_process '{"kind": "client", "target": "localhost:50051"}'`. Commands are `prepare` (draw distinct
images, make one call) and `run` (calls until a time). Times are read from the monotonic clock, which all processes of a
machine share. `bench/client_processes.py` is the other side.
"""

import json
import sys
import time
from functools import partial

from bench.callers import Caller, Raw, Row, SyncClient, Work
from bench.commands import answer_commands

from vitwire.shared import allocator
from vitwire_cli.bench.load import Pace


def _caller(kind: str, settings: Row) -> Caller:
    kinds: dict[str, type[Caller]] = {"client": SyncClient, "raw": Raw}
    return kinds[kind](**settings)


def _answered(caller: Caller, command: Row) -> Row:
    if "prepare" in command:
        return caller.prepare(Work(**command["prepare"]))
    run = command["run"]
    return caller.run(Pace(run["in_flight"], run["stop"] - time.monotonic()))  # no call starts after `stop`


def main() -> None:
    settings = json.loads(sys.argv[1])
    allocator.tune()  # as docs/client.md recommends for a process of many calls; for the bare client as well
    answer_commands(partial(_answered, _caller(settings.pop("kind"), settings)))


if __name__ == "__main__":
    main()
