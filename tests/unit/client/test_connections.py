"""How calls choose a connection, and when a client opens another."""

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import grpc
import pytest

from both_clients import Call, both, large
from fake_service import Fake, Running, item, serving
from servers import finished
from vitwire import Client
from vitwire._transport.calls import Timers
from vitwire._transport.channel import HEALTH_OPTIONS, OPTIONS, ChannelOptions
from vitwire._transport.connections import Connections
from waiting import until


def connections(limit: int) -> Connections[int]:
    """Channels are numbered as they are opened."""
    opened: list[ChannelOptions] = []

    def open_channel(options: ChannelOptions) -> int:
        opened.append(options)
        return len(opened) - 1

    return Connections(open_channel, limit)


def test_overlapping_calls_open_connections_up_to_the_limit() -> None:
    pool = connections(3)
    with ExitStack() as calls:
        used = [calls.enter_context(pool.bulk(nbytes, stream=False)).channel for nbytes in (9 << 20, 5, 7 << 20, 5)]
    assert used == [0, 1, 2, 1]
    with pool.bulk(1, stream=False) as connection:
        assert (connection.channel, connection.load > 1) == (0, True)


def test_streams_control_calls_and_messages_use_different_connections() -> None:
    pool = connections(1)
    with pool.bulk(1, stream=False) as message, pool.bulk(1, stream=True) as stream:
        used = {message.channel, stream.channel, pool.control(OPTIONS), pool.control(HEALTH_OPTIONS)}
    assert len(used) == 4
    assert pool.control(OPTIONS) == 2
    assert sorted(pool.close()) == [0, 1, 2, 3]


def test_a_failed_connection_is_avoided() -> None:
    pool = connections(2)
    with pool.bulk(1, stream=False) as first:
        first.avoid()
    with pool.bulk(1, stream=False) as second:
        assert second.channel == 1
        second.avoid()
        with pool.bulk(1, stream=False) as third:
            assert third is first
    with pool.bulk(1, stream=False, again=second) as fourth:
        assert fourth is second


@both
@pytest.mark.parametrize("size", ["Encode", "EncodeStream"])
async def test_concurrent_calls_arrive_over_several_connections(make: Call, size: str) -> None:
    peers, together = set(), threading.Barrier(4)

    def before(context: grpc.ServicerContext) -> None:
        if fake.methods[-1] != "GetModel":
            together.wait(60)
        peers.add((context.peer(), fake.methods[-1] == "GetModel"))

    fake = Fake(before)
    sent = item() if size == "Encode" else large()
    with serving(fake) as running:
        async with make(running.target, timeout=90, connections=3) as client:
            await client.model()
            await asyncio.gather(*(client.encode([sent]) for _ in range(4)))
    control = {peer for peer, is_control in peers if is_control}
    bulk = {peer for peer, is_control in peers if not is_control}
    assert (len(control), len(bulk)) == (1, 3)
    assert not control & bulk


@both
async def test_one_connection_serves_calls_one_after_another(make: Call) -> None:
    peers = set()
    fake = Fake(lambda context: peers.add(context.peer()) if fake.methods[-1] == "Encode" else None)
    with serving(fake) as running:
        async with make(running.target, timeout=60) as client:
            for _ in range(5):
                await client.encode([item()])
    assert len(peers) == 1


@both
async def test_a_refused_call_is_repeated_on_another_connection(make: Call) -> None:
    """So that a client leaves an RPC process that is going away."""
    peers: list[str] = []

    def before(context: grpc.ServicerContext) -> None:
        if fake.methods[-1] == "Encode":
            peers.append(context.peer())
            if len(peers) == 1:
                context.abort(grpc.StatusCode.UNAVAILABLE, "as asked")

    fake = Fake(before)
    with serving(fake) as running:
        async with make(running.target, timeout=60) as client:
            await client.encode([item()])
    assert len(set(peers)) == 2


def test_several_servers_on_one_port_are_all_used() -> None:
    """The kernel gives each connection to one of them; all calls are in flight until both servers have one."""
    reached = [threading.Event(), threading.Event()]

    def fake(own: int) -> Fake:
        def before(_: grpc.ServicerContext) -> None:
            if each.methods[-1] == "Encode":
                reached[own].set()
                assert reached[1 - own].wait(60)

        each = Fake(before)
        return each

    with serving(fake(0), shared=True) as first:
        port = int(first.target.rpartition(":")[2])
        with serving(fake(1), port, shared=True), Client(first.target, timeout=120, connections=24) as client:
            client.model()
            with ThreadPoolExecutor(24) as pool:
                assert len(list(pool.map(lambda _: client.encode([item()]), range(24)))) == 24


FORKING = """
import os, sys
import numpy as np
from vitwire import Client, Item
item = Item(np.ones((4, 6), np.float32), (1, 2, 2))
client = Client(sys.argv[1], timeout=60)
client.encode([item])
child = os.fork()
if not child:
    try:
        client.encode([item])
    except RuntimeError as error:
        os.write(1, str(error).encode())
    os._exit(0)
os.waitpid(child, 0)
client.encode([item])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_process_needs_its_own_client(running: Running) -> None:
    done = finished(running.target, program=("-c", FORKING))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "the client was used before this process was forked; make a client in each process"


class TestTimers:
    def test_an_earlier_one_does_not_wait_for_a_later_one(self) -> None:
        timers = Timers()
        soon, late = threading.Event(), threading.Event()
        later = timers.start(3600.0, late.set)
        timers.start(0.05, soon.set)
        assert soon.wait(60)
        assert timers.cancel(later)
        assert not late.is_set()

    def test_a_cancelled_one_is_not_called(self) -> None:
        timers = Timers()
        done, called = threading.Event(), threading.Event()
        timer = timers.start(3600.0, called.set)
        assert timers.cancel(timer)
        assert not timers.cancel(timer)
        last = timers.start(0.0, done.set)
        assert done.wait(60)
        assert not timers.cancel(last)
        assert not called.is_set()

    @pytest.mark.parametrize("end", [Timers.close, lambda _: None], ids=["closed", "all due"])
    def test_its_thread_ends(self, end: Callable[[Timers], None]) -> None:
        timers = Timers()
        timers.start(3600.0 if end is Timers.close else 0.0, lambda: None)
        end(timers)
        until(lambda: not timers._is_running)
