"""A client process of the benchmarks: one JSON command a line on stdin, one JSON answer a line on stdout.

`python -m bench.driver '{"kind": "client", "target": "localhost:50051"}'`. Commands are `prepare` (draw distinct
images, make one call) and `run` (calls, so many or until a time, with so many in flight). Times are those of the
monotonic clock, which all processes of a machine share. `bench/fleet.py` is the other side.
"""

import json
import sys
from dataclasses import fields

from bench.calls import Done, Driver, Pace, Row, Work

from vitwire import allocator


def _driver(kind: str, settings: Row) -> Driver:
    if kind == "tower":
        from bench.in_process import Tower  # noqa: PLC0415 - imports torch, which clients do without

        return Tower(**settings)
    from bench.callers import Health, OfAsyncClient, OfClient, Raw  # noqa: PLC0415 - a tower does without gRPC

    kinds: dict[str, type[Driver]] = {"client": OfClient, "async": OfAsyncClient, "raw": Raw, "health": Health}
    return kinds[kind](**settings)


def _answered(driver: Driver, command: Row) -> Row:
    if "prepare" in command:
        return driver.prepare(Work(**command["prepare"]))
    done = driver.run(Pace(**command["run"]))
    return {field.name: [getattr(each, field.name) for each in done] for field in fields(Done)}


def main() -> None:
    settings = json.loads(sys.argv[1])
    allocator.tune()  # as docs/client.md recommends for a process of many calls; for the bare client as well
    driver = _driver(settings.pop("kind"), settings)
    for line in sys.stdin:
        try:
            answer = _answered(driver, json.loads(line))
        except Exception as error:  # noqa: BLE001 - the parent process reports it
            answer = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
    driver.close()


if __name__ == "__main__":
    main()
