"""A client process of the benchmarks: one JSON command a line on stdin, one JSON answer a line on stdout.

`python -m bench.driver '{"kind": "client", "target": "localhost:50051"}'`. Commands are `prepare` (draw distinct
images, make one call) and `run` (calls, so many or until a time, with so many in flight). Times are those of the
monotonic clock, which all processes of a machine share. `bench/fleet.py` is the other side. With `"staged": true` the
command `stages` returns what the client's own steps took; with `"tuned": false` the allocator stays as glibc has it.
"""

import json
import sys
from dataclasses import fields
from typing import TYPE_CHECKING

from bench.calls import Done, Driver, Pace, Row, Work

from vitwire.shared import allocator

if TYPE_CHECKING:
    from bench.stages import Stages


def _driver(kind: str, settings: Row) -> Driver:
    if kind == "tower":
        from bench.in_process import Tower  # noqa: PLC0415 - imports torch, which clients do without

        return Tower(**settings)
    from bench.callers import Health, OfAsyncClient, OfClient, Raw  # noqa: PLC0415 - a tower does without gRPC

    kinds: dict[str, type[Driver]] = {"client": OfClient, "async": OfAsyncClient, "raw": Raw, "health": Health}
    return kinds[kind](**settings)


def _answered(driver: Driver, stages: "Stages | None", command: Row) -> Row:
    if "stages" in command:
        assert stages, "the client was started with it"
        return stages.taken()
    if "prepare" in command:
        return driver.prepare(Work(**command["prepare"]))
    done = driver.run(Pace(**command["run"]))
    return {field.name: [getattr(each, field.name) for each in done] for field in fields(Done)}


def _stages() -> "Stages":
    from bench.stages import Stages  # noqa: PLC0415 - a tower does without gRPC

    return Stages()


def main() -> None:
    settings = json.loads(sys.argv[1])
    if settings.pop("tuned", True):
        allocator.tune()  # as docs/client.md recommends for a process of many calls; for the bare client as well
    stages = _stages() if settings.pop("staged", False) else None
    driver = _driver(settings.pop("kind"), settings)
    for line in sys.stdin:
        try:
            answer = _answered(driver, stages, json.loads(line))
        except Exception as error:  # noqa: BLE001 - the parent process reports it
            answer = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
    driver.close()


if __name__ == "__main__":
    main()
