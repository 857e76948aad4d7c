"""Links between processes: every message arrives, whole and in order, and the end of a process is noticed."""

import asyncio
import socket
import sys
from collections.abc import Sequence

import pytest

from vitwire_server.scheduling.tickets import Priority
from vitwire_server.sessions.link import Link
from vitwire_server.sessions.messages import FROM_ENGINE, FROM_RPC, Ask, Queue, Release, Reply, ToEngine, ToRpc
from vitwire_server.sessions.session import Opening

SECONDS = 60
ECHO = """
import asyncio, socket, sys
from vitwire_server.sessions.link import Link
from vitwire_server.sessions.messages import FROM_RPC, Reply

async def main():
    def answer(message):
        if type(message).__name__ == "Ask":  # whose request id is as long as the answer is to be
            link.send(Reply(message.session, [], message.opening.request_id.encode()))
        else:
            link.send(Reply(message.session, [message.key]))

    link = await Link.over(socket.socket(fileno=int(sys.argv[1])), FROM_RPC, answer)
    await link.lost.wait()

asyncio.run(main())
"""


class Peer:
    """A process that answers each message, and the link to it."""

    def __init__(self) -> None:
        self.received: asyncio.Queue[ToRpc] = asyncio.Queue()
        self.link: Link[ToRpc, ToEngine]
        self.process: asyncio.subprocess.Process

    async def start(self) -> "Peer":
        own, other = socket.socketpair()
        with other:
            command = (sys.executable, "-c", ECHO, str(other.fileno()))
            self.process = await asyncio.create_subprocess_exec(*command, pass_fds=[other.fileno()])
        self.link = await Link.over(own, FROM_ENGINE, self.received.put_nowait)
        return self

    async def next(self) -> ToRpc:
        return await asyncio.wait_for(self.received.get(), SECONDS)


def opening(number: int, nbytes: int) -> Ask:
    return Ask(number, 0, Opening("", "", None, Priority.BATCH, "x" * nbytes), 1)


async def test_a_message_that_cannot_be_encoded_costs_no_other(caplog: pytest.LogCaptureFixture) -> None:
    peer = await Peer().start()
    for key in (1, 1 << 70, 3):  # of one turn, and so of one frame
        peer.link.send(Release(0, key))
    assert [await peer.next() for _ in range(2)] == [Reply(0, [1]), Reply(0, [3])]
    assert "a Release is not sent" in caplog.text
    peer.link.close()
    await asyncio.wait_for(peer.process.wait(), SECONDS)


async def test_messages_of_all_sizes_many_at_once_and_in_order() -> None:
    peer = await Peer().start()
    sizes = [0, 1, 65_535, 65_536, 3 << 20, 7, 1 << 20] * 3
    for number, nbytes in enumerate(sizes):
        peer.link.send(opening(number, nbytes))
    for number in range(5000):
        peer.link.send(Release(number, number + 1))
    for number, nbytes in enumerate(sizes):
        assert await peer.next() == Reply(number, [], b"x" * nbytes)
    for number in range(5000):
        assert await peer.next() == Reply(number, [number + 1])
    peer.link.close()
    assert await asyncio.wait_for(peer.process.wait(), SECONDS) == 0, "the other end is closed"


async def test_the_end_of_a_process_is_noticed() -> None:
    peer = await Peer().start()
    peer.link.send(Release(1, 2))
    assert await peer.next() == Reply(1, [2])
    peer.process.kill()
    await asyncio.wait_for(peer.link.lost.wait(), SECONDS)
    peer.link.send(Release(1, 2))  # goes nowhere
    peer.link.close()
    await peer.process.wait()


@pytest.mark.parametrize("nbytes", [1, 3, 5])
async def test_messages_in_pieces(nbytes: int) -> None:
    """Bytes may come in any pieces, and several messages at once."""
    received: list[ToEngine] = []
    link: Link[ToEngine, ToRpc] = Link(FROM_RPC, received.append)
    sender: Link[ToRpc, ToEngine] = Link(FROM_ENGINE, lambda _: None)
    messages = [opening(1, 300), Release(1, 2), Queue(3, 1, None, [2], {2: b"digest"})]
    raw = framed(sender, messages[:2]) + framed(sender, messages[2:])
    for start in range(0, len(raw), nbytes):
        link.data_received(raw[start : start + nbytes])
    assert received == messages
    link.data_received(raw)
    assert received == messages * 2


def framed(link: Link[ToRpc, ToEngine], messages: Sequence[ToEngine]) -> bytes:
    """The bytes of messages of one turn, as they are written."""
    written = bytearray()

    class Transport(asyncio.Transport):
        def is_closing(self) -> bool:
            return False

        def write(self, data: bytes | bytearray | memoryview) -> None:
            written.extend(data)

        def close(self) -> None:
            pass

    link.connection_made(Transport())
    for message in messages:
        link.send(message)
    link.close()
    return bytes(written)
