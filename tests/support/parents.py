"""Run as a program: starts a child of the kind that is named, writes the ids of its processes, and waits.

It has a file open, `OPEN`, which anything could inherit.
"""

import asyncio
import json
import os
import sys
from asyncio.subprocess import Process

import psutil

from vitwire_children.confine import be_private

OPEN = "a file that is open"
SECRET = "VITWIRE_SECRET"
_SUPERVISED = """
import time
from vitwire_children.heartbeat import inherited
inherited()
print("up", flush=True)
time.sleep(600)
"""
_held: list[object] = []
"""What must not be collected."""


async def decoder(device: str = "") -> list[int]:
    from confined_children import started  # noqa: PLC0415 - each kind imports what it needs

    child = await started(device)
    return _kept(child, child.process)


async def device() -> list[int]:
    return await decoder("cpu")


async def worker() -> list[int]:
    from vitwire_gateway.workers import Workers  # noqa: PLC0415 - as above

    workers = Workers("vitwire_gateway.images.image_files", 1 << 28)
    await workers._pool.start(1)
    return _kept(workers, workers._pool._idle[0].process)


async def matching() -> list[int]:
    from vitwire_children.jobs import Child, Program  # noqa: PLC0415 - as above

    child = await Child.start(Program("vitwire_server.towers.checkpoints.matching"))
    return _kept(child, child.process)


async def sender() -> list[int]:
    from vitwire_server.delivery.senders import Senders  # noqa: PLC0415 - as above

    senders = Senders(1 << 20)
    senders.start()
    _held.append(senders)
    return [each.pid for each in psutil.Process().children(recursive=True)]


async def supervised() -> list[int]:
    from vitwire_server.config.settings import ServeSettings  # noqa: PLC0415 - as above
    from vitwire_server.process.children import ChildProcess, Launch  # noqa: PLC0415 - as above

    up = asyncio.Event()
    launch = Launch((sys.executable, "-c", _SUPERVISED))
    child = ChildProcess("cpu", lambda: launch, ServeSettings(model="m"), on_stdout=lambda _: up.set())
    _held.append(asyncio.create_task(child.keep_running(asyncio.Event())))
    await up.wait()
    assert child.pid
    return [child.pid]


def _kept(child: object, process: Process) -> list[int]:
    _held.append(child)
    return [process.pid]


KINDS = (decoder, device, worker, matching, sender, supervised)


async def main(name: str) -> None:
    be_private()
    (kind,) = (each for each in KINDS if each.__name__ == name)
    sys.stderr.write(json.dumps(await kind()) + "\n")
    await asyncio.sleep(600)


if __name__ == "__main__":
    os.set_inheritable(os.open(OPEN, os.O_RDWR | os.O_CREAT), True)
    os.environ[SECRET] = "a secret"
    asyncio.run(main(sys.argv[1]))
