"""Sessions whose engine, or whose edge, is gone or not ready."""

import asyncio

import pytest

from session_rig import SECONDS, Rig, item
from vitwire_server.core.errors import (
    Unavailable,
)
from vitwire_server.sessions.host import not_ready
from vitwire_server.sessions.messages import (
    Close,
    Reply,
    Reserve,
    form_of,
    unpickled,
)
from vitwire_server.sessions.remote import RemoteSessions


async def test_a_lost_engine_ends_rpcs(remote: Rig) -> None:
    """Also those that wait for an answer; what comes later is refused at once."""
    assert isinstance(remote.sessions, RemoteSessions)
    idle, rpc = remote.session(), remote.session()
    await rpc.submit({key: item() for key in range(4)})
    waiting = asyncio.create_task(rpc.session.reserve(9, item()))
    await asyncio.sleep(0.05)
    remote.sessions.lost(Unavailable("gone"))
    with pytest.raises(Unavailable, match="gone"):
        await waiting
    assert [str(fault) for each in (idle, rpc) for fault in each.faults] == ["gone", "gone"]
    idle.close()
    rpc.close()
    remote.own.close()
    await asyncio.wait_for(remote.other.lost.wait(), SECONDS)
    with pytest.raises(Unavailable, match="ended"):
        await remote.session().submit({1: item()})
    assert remote.host
    remote.host.close()


async def test_a_process_that_is_gone_gives_everything_back(remote: Rig) -> None:
    remote.open.clear()
    rpcs = [remote.session() for _ in range(3)]
    await rpcs[0].upload(1, item(1))
    await rpcs[0].session.reserve(2, item(2))
    await rpcs[1].submit({1: item(3)})
    waiting = asyncio.create_task(rpcs[0].submit({key: item() for key in (5, 6)}))
    await asyncio.sleep(0.05)
    assert remote.host
    remote.host.close()
    waiting.cancel()
    await remote.settle()


def test_requests_before_the_model_is_loaded_are_refused() -> None:
    form = form_of(item())
    reply = not_ready(Reserve(1, 7, None, 1, form))
    assert isinstance(reply, Reply)
    assert reply.number == 7
    assert "loading" in str(unpickled(reply.error, Unavailable))
    assert not_ready(Close(1)) is None
