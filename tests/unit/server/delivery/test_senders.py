"""Senders that were taken over, and those that cannot be started."""

import errno
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest

from vitwire.shared.agents import AgentError
from vitwire_children import spawn
from vitwire_server.delivery.messages import MAX_MESSAGE
from vitwire_server.delivery.senders import Sender, Senders

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="delivery is for Linux")
OPEN = Path("/proc/self/fd")
NESTED = b"\x92\x02" + b"\x91" * (MAX_MESSAGE // 2) + b"\x90"
NO_TEXT = b"\x93\x01\x01\xa2\xff\xfe"


@pytest.mark.parametrize("garbage", [NESTED, NO_TEXT, b"\xc1", b"\x92\x01"])
def test_a_sender_that_sends_garbage_is_gone(garbage: bytes) -> None:
    """Texts that are none and arrays within arrays ended the delivery of all others."""
    with spawn.connected(socket.SOCK_SEQPACKET) as (link, theirs):
        theirs.sendall(garbage)
        assert Sender(1, link, cast("Any", None)).received() is None
        link.close()


def test_a_sender_that_cannot_be_started_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.close()
        links.append(ours)
        return ours

    links = list[socket.socket]()
    senders = Senders(1 << 20)
    monkeypatch.setattr(Senders, "_factory", broken)
    before = len(list(OPEN.iterdir()))
    for _ in range(3):
        with pytest.raises(AgentError):
            senders.start()
        links.pop().close()
    assert len(list(OPEN.iterdir())) == before
    senders.close()


def test_senders_are_not_started_without_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> NoReturn:
        raise OSError(errno.EMFILE, "Too many open files")

    senders = Senders(1 << 20)
    monkeypatch.setattr(socket, "socketpair", none_left)
    with pytest.raises(AgentError, match="Too many open files"):
        senders.start()
    senders.close()
