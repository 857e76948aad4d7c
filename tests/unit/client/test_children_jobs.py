"""Answers and ends of children that the parent must bear."""

import asyncio
import errno
import socket
import time
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest

from vitwire_children import restarts, spawn
from vitwire_children.jobs import Child, Program
from vitwire_children.restarts import STEADY_SECONDS, Restarts
from vitwire_children.serving import LENGTH, Fault, NotDone


def no_descriptors(*_: object) -> NoReturn:
    raise OSError(errno.EMFILE, "Too many open files")


async def test_an_answer_of_many_bytes_blocks_nobody_for_long() -> None:
    """Each was compared with the sum of those before: the largest answer took minutes."""
    head = b"[" + b",".join([b'{"bytes":0}'] * 20_000) + b"]"
    with spawn.connected() as (link, theirs):
        child = Child(cast("Any", SimpleNamespace(returncode=0)), link)
        sending = asyncio.create_task(asyncio.to_thread(theirs.sendall, LENGTH.pack(len(head)) + head))
        start = time.process_time()
        assert len(await child._received(0)) == 20_000
        assert time.process_time() - start < 3
        await sending
        link.close()


async def test_a_child_without_descriptors_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "socketpair", no_descriptors)
    with pytest.raises(NotDone, match="Too many open files") as caught:
        await Child.start(Program("not started"))
    assert caught.value.fault is Fault.LOST


def test_pauses_stay_long_while_every_start_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a pause as long as what counts as steady they began anew, and those shorter overflowed in the end."""
    now = 0.0
    monkeypatch.setattr(restarts.time, "monotonic", lambda: now)
    for longest in (30.0, STEADY_SECONDS):
        failing, pauses = Restarts(0.5, longest), list[float]()
        for _ in range(1100):
            pauses.append(failing.failed())
            now += pauses[-1]
        assert pauses == sorted(pauses)
        assert pauses[-1] == longest
