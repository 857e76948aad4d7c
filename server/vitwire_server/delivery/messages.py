"""Messages between a server and its delivery processes. The rows lie in memory that both share."""

from typing import TypeAlias

from msgspec import Struct
from msgspec.msgpack import Decoder

MAX_MESSAGE = 1 << 17
"""Bytes of a message, which is one packet of a socket."""

# -- to the factory --------------------------------------------------------------------------------


class Fork(Struct, array_like=True, frozen=True, tag=0):
    """Start a sender. Its socket and the file of its staging memory come with the message."""

    number: int


class End(Struct, array_like=True, frozen=True, tag=1):
    """Kill a sender."""

    number: int


# -- to a sender -----------------------------------------------------------------------------------


class Outbox(Struct, array_like=True, frozen=True):
    """The server's device memory with rows, which a sender maps."""

    device: int
    nbytes: int
    handle: bytes
    offset: int
    """Where the outbox begins in the allocation of the handle."""


class Setup(Struct, array_like=True, frozen=True, tag=0):
    """The first message, answered with Ready."""

    staging_bytes: int
    outbox: Outbox | None


class Add(Struct, array_like=True, frozen=True, tag=1):
    """A client's agent that Write messages are going to name."""

    agent: str
    metadata: bytes


class Remove(Struct, array_like=True, frozen=True, tag=2):
    """Disconnect from an agent."""

    agent: str


class Write(Struct, array_like=True, frozen=True, tag=3):
    """Write rows into a client's memory; answered with Ended."""

    number: int
    agent: str
    offset: int
    """Where the rows are in the outbox if the target is on a device, else in the staging memory."""
    nbytes: int
    address: int
    device: int | None
    """The device of the client's memory; None on the host."""


# -- from a sender ---------------------------------------------------------------------------------


class Ready(Struct, array_like=True, frozen=True, tag=0):
    """The sender has started, unless there is a fault."""

    fault: str


class Ended(Struct, array_like=True, frozen=True, tag=1):
    """The rows were written, unless there is a fault."""

    number: int
    fault: str
    refused: bool = False
    """The agent's metadata cannot be loaded."""


class Beat(Struct, array_like=True, frozen=True, tag=2):
    """Sent at times while writes are under way: the sender does not hang."""


ToFactory: TypeAlias = Fork | End
ToSender: TypeAlias = Setup | Add | Remove | Write
FromSender: TypeAlias = Ready | Ended | Beat
TO_FACTORY: Decoder[ToFactory] = Decoder(ToFactory)
TO_SENDER: Decoder[ToSender] = Decoder(ToSender)
FROM_SENDER: Decoder[FromSender] = Decoder(FromSender)
