"""Receive slots: shared between callers, and taken back from silent ones while others wait."""

import asyncio
from typing import TYPE_CHECKING, Any, cast

import pytest

from vitwire_server.core.errors import DeadlineExceeded, Overloaded
from vitwire_server.rpc import receive_slots as module
from vitwire_server.rpc.receive_slots import ReceiveSlots

if TYPE_CHECKING:
    from vitwire_server.rpc.grpc_types import Context

LONG = 60.0
CROWDED = 0.05


class Sender:
    """gRPC's context of a client that sends its message at once, or never."""

    def __init__(self, peer: str, message: bytes | None = None) -> None:
        self._peer = peer
        self._message = message

    def peer(self) -> str:
        return self._peer

    def peer_identities(self) -> None:
        return None

    async def read(self) -> bytes:
        if self._message is None:
            await asyncio.Event().wait()
        return self._message or b""


def reading(slots: ReceiveSlots, peer: str, message: bytes | None = None) -> asyncio.Task[Any]:
    return asyncio.create_task(slots.read(cast("Context", Sender(peer, message))))


async def cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> ReceiveSlots:
    """Four slots."""
    monkeypatch.setattr(module, "_CROWDED_SECONDS", CROWDED)
    return ReceiveSlots(max_message_bytes=1, max_bytes=4, stall_seconds=LONG)


async def test_one_host_cannot_hold_all_slots() -> None:
    slots = ReceiveSlots(max_message_bytes=1, max_bytes=4, stall_seconds=LONG)
    silent = [reading(slots, f"ipv4:10.0.0.1:{port}") for port in range(100)]
    await asyncio.sleep(0)
    assert await reading(slots, "ipv4:10.0.0.2:1", b"hello") == b"hello"
    assert not any(task.done() for task in silent)
    await cancel(*silent)
    assert (slots.slots.used, slots.slots.waiting) == (0, 0)


async def test_a_silent_caller_loses_its_slot_when_another_request_waits(slots: ReceiveSlots) -> None:
    silent = [reading(slots, "ipv4:10.0.0.1:1") for _ in range(3)]
    await asyncio.sleep(4 * CROWDED)
    assert not any(task.done() for task in silent), "no other request waits"
    assert await reading(slots, "ipv4:10.0.0.1:2", b"hello") == b"hello"
    await asyncio.sleep(CROWDED)
    done = [task for task in silent if task.done()]
    assert [type(task.exception()) for task in done] == [Overloaded]
    await cancel(*silent)
    assert (slots.slots.used, slots.slots.waiting) == (0, 0)


async def test_a_connection_without_a_slot_goes_first(slots: ReceiveSlots) -> None:
    silent = [reading(slots, "ipv4:10.0.0.1:1") for _ in range(30)]
    await asyncio.sleep(0)
    assert await reading(slots, "ipv4:10.0.0.1:2", b"hello") == b"hello"
    assert sum(task.done() for task in silent) <= 3, "one round of evictions, however many were there before"
    await cancel(*silent)


async def test_a_waiting_request_may_end_at_the_moment_a_slot_gets_free(slots: ReceiveSlots) -> None:
    silent = [reading(slots, f"ipv4:10.0.0.{host}:1") for host in range(4)]
    await asyncio.sleep(0)
    waiting = reading(slots, "ipv4:10.0.0.9:1", b"hello")
    await asyncio.sleep(0)
    waiting.cancel()  # its future is cancelled now, the task runs later
    slots.slots._grant()
    silent[0].cancel()
    await cancel(*silent)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (slots.slots.used, slots.slots.waiting) == (0, 0)


async def test_a_message_that_does_not_come_ends_after_the_stall_seconds() -> None:
    slots = ReceiveSlots(max_message_bytes=1, max_bytes=4, stall_seconds=CROWDED)
    with pytest.raises(DeadlineExceeded, match="did not arrive within"):
        await reading(slots, "unix:")
    assert slots.slots.used == 0


async def test_addresses_of_one_network_are_one_caller() -> None:
    """An IPv6 host chooses among 2⁶⁴ of them, and each had a share."""
    slots = ReceiveSlots(max_message_bytes=1, max_bytes=4, stall_seconds=LONG)
    silent = [reading(slots, f"ipv6:%5B2001:db8:1:2::{host:x}%5D:5000") for host in range(1, 9)]
    await asyncio.sleep(0)
    assert slots.slots.used == 3
    assert await reading(slots, "ipv6:%5B2001:db8:1:3::1%5D:5000", b"hello") == b"hello"
    await cancel(*silent)
