"""Child processes: what they inherit, how they are followed, and the labels of their lines."""

import asyncio
import json
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import replace

import psutil
import pytest

from vitwire_children import heartbeat
from vitwire_children.confine import PARENT
from vitwire_children.restarts import Restarts
from vitwire_server.config.settings import ServeSettings
from vitwire_server.process.children import ChildProcess, Launch, labelled

ECHO = "import os, socket; link = socket.socket(fileno=int(os.environ['LINK'])); link.send(link.recv(9))\n"
FOREVER = "import time\ntime.sleep(60)\n"


class Linked:
    """A launch that hands one end of a socket pair to the child, and writes down what happens."""

    def __init__(self, code: str, events: list[str]) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.events = events
        self.running = asyncio.Event()
        environment = {"LINK": str(self.theirs.fileno())}
        follow = {"release": self.release, "started": self.started, "ended": self.ended}
        self.launch = Launch((sys.executable, "-c", code), environment, [self.theirs.fileno()], **follow)

    def release(self) -> None:
        self.theirs.close()
        self.events.append("release")

    def started(self, pid: int) -> None:
        assert pid > 0
        self.ours.setblocking(False)
        self.events.append("started")
        self.running.set()

    def ended(self) -> None:
        self.ours.close()
        self.events.append("ended")


def kept(launch: Callable[[], Launch]) -> ChildProcess:
    return ChildProcess("rpc-0", launch, ServeSettings(model="m"))


async def test_each_start_has_its_own_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Restarts, "failed", lambda _: 0.01)
    events: list[str] = []
    launches: asyncio.Queue[Linked] = asyncio.Queue()

    def launch() -> Launch:
        made = Linked(ECHO, events)
        launches.put_nowait(made)
        return made.launch

    child, stopping, loop = kept(launch), asyncio.Event(), asyncio.get_running_loop()
    running = asyncio.create_task(child.keep_running(stopping))
    for _ in range(2):
        link = (await launches.get()).ours
        link.setblocking(False)
        child.mark_ready()
        await loop.sock_sendall(link, b"ping")
        assert await asyncio.wait_for(loop.sock_recv(link, 9), 30) == b"ping"
    stopping.set()
    await asyncio.wait_for(running, 30)
    assert child.pid is None
    assert events[:6] == ["release", "started", "ended"] * 2
    assert len(events) % 3 == 0


async def test_cancelling_kills_the_process() -> None:
    events: list[str] = []
    launch = Linked(FOREVER, events)
    child = kept(lambda: launch.launch)
    running = asyncio.create_task(child.keep_running(asyncio.Event()))
    await asyncio.wait_for(launch.running.wait(), 30)
    process = psutil.Process(child.pid)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert events == ["release", "started", "ended"]
    assert not process.is_running()


async def test_a_command_that_cannot_start_leaves_nothing_open() -> None:
    events: list[str] = []

    def launch() -> Launch:
        return replace(Linked("", events).launch, command=["/nowhere/python"])

    before = psutil.Process().num_fds()
    with pytest.raises(FileNotFoundError):
        await kept(launch).keep_running(asyncio.Event())
    assert events == ["release", "ended"]
    assert psutil.Process().num_fds() <= before


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel for it")
async def test_a_child_does_not_outlive_its_parent() -> None:
    """The grandchild would write to a pipe after its parent was killed, but the kernel ends it too."""
    grandchild = (
        "import os, sys, time\nfrom vitwire_children.heartbeat import inherited\n"
        "inherited()\nprint('up', flush=True)\n"
        "sys.stdin.read()\ntime.sleep(1)\nos.write(int(sys.argv[1]), b'.')"
    )
    parent = (
        "import os, subprocess, sys, time\n"
        "sys.path[:0] = eval(sys.argv[3])\n"
        f"os.environ['{heartbeat.VARIABLE}'] = sys.argv[2]\n"
        f"os.environ['{PARENT}'] = str(os.getpid())\n"
        f"subprocess.Popen([sys.executable, '-c', {grandchild!r}, sys.argv[1]], stdin=subprocess.PIPE,"
        " pass_fds=[int(sys.argv[1]), int(sys.argv[2])])\n"
        "time.sleep(60)\n"
    )
    (words, writes), (_, beats) = os.pipe(), os.pipe()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", parent, str(writes), str(beats), repr(sys.path)),
        stdout=asyncio.subprocess.PIPE,
        pass_fds=(writes, beats),
    )
    os.close(writes)
    assert process.stdout
    assert await asyncio.wait_for(process.stdout.readline(), 60) == b"up\n"
    process.kill()
    await process.wait()
    assert not await asyncio.to_thread(os.read, words, 1)
    os.close(words)
    os.close(beats)


def test_lines_of_nested_processes_have_one_label() -> None:
    edge = labelled("rpc-1", b"hello", json_lines=False)
    assert edge == b"[rpc-1] hello"
    assert labelled("cuda:0", edge, json_lines=False) == b"[cuda:0/rpc-1] hello"
    assert labelled("cuda:0", b"[W1122] hello", json_lines=False) == b"[cuda:0] [W1122] hello"


@pytest.mark.parametrize("line", [b'{"message": "hello"}', b"hello"])
def test_json_lines_of_nested_processes_have_one_key(line: bytes) -> None:
    nested = labelled("cuda:0", labelled("rpc-1", line, json_lines=True), json_lines=True)
    assert json.loads(nested) == {"process": "cuda:0/rpc-1", "message": "hello"}
    assert nested.count(b"process") == 1
