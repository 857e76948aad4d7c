"""Messages between the engine's process and those of RPCs. Both are of one release, so nothing is versioned."""

import pickle
from typing import TypeAlias, TypeVar

from msgspec import Struct
from msgspec.msgpack import Decoder

from vitwire_server.core.delivery import Delivered, Fallback, NotDelivered, Region, Stored
from vitwire_server.core.errors import EncoderError
from vitwire_server.core.items import DType, Embedding
from vitwire_server.core.reports import Encoded, ItemReport
from vitwire_server.sessions.forms import ConsumerForm, ItemForm, LookupForm

T = TypeVar("T")
BEAT_SECONDS = 1.0


# -- from RPCs to the engine; `session` and `number` are chosen by the sender ----------------------


class Open(Struct, array_like=True, frozen=True, tag=0):
    """Open a session."""

    session: int
    principal: str
    caller: str
    deadline: float | None
    priority: int
    request_id: str
    consumer: ConsumerForm | None


class Reserve(Struct, array_like=True, frozen=True, tag=1):
    """Answered with the offset of the memory for the item's bytes."""

    number: int
    session: int
    key: int
    item: ItemForm


class Admit(Struct, array_like=True, frozen=True, tag=2):
    """Answered with an offset for each item with pixels."""

    number: int
    session: int
    items: dict[int, ItemForm | LookupForm]


class Queue(Struct, array_like=True, frozen=True, tag=3):
    """Items that have their bytes now, and their digests where the engine needs them. Answered."""

    number: int
    session: int
    items: list[int]
    digests: dict[int, bytes]
    regions: dict[int, tuple[int, int, bool]] = {}
    """Offset and bytes of regions, perhaps leased after the item was reserved, and whether they are on a device."""


class Submit(Struct, array_like=True, frozen=True, tag=8):
    """Items whose bytes were written into spare blocks, which lie at `blocks`: admit and queue them. Answered."""

    number: int
    session: int
    items: dict[int, ItemForm]
    blocks: list[int]
    digests: dict[int, bytes]


class Find(Struct, array_like=True, frozen=True, tag=9):
    """Answer an item from the cache, by the digest of its content. Answered with one offset if it was cached."""

    number: int
    session: int
    key: int
    item: ItemForm
    digest: bytes


class Ask(Struct, array_like=True, frozen=True, tag=10):
    """Answered with the microseconds until a new item of so many tokens would be encoded."""

    number: int
    session: int
    tokens: int


class Release(Struct, array_like=True, frozen=True, tag=4):
    """The item's rows are not read any more."""

    session: int
    key: int


class Close(Struct, array_like=True, frozen=True, tag=5):
    """Close a session."""

    session: int


class Started(Struct, array_like=True, frozen=True, tag=6):
    """The process listens, or cannot for this reason."""

    fault: str


class Drained(Struct, array_like=True, frozen=True, tag=7):
    """Nothing is in flight any more, or the time is over."""


# -- from the engine to RPCs -----------------------------------------------------------------------


class Reply(Struct, array_like=True, frozen=True, tag=0):
    """The answer to the request of that number."""

    number: int
    offsets: list[int]
    error: bytes = b""
    """A pickled EncoderError."""


class Rows(Struct, array_like=True, frozen=True, tag=1):
    """An item was encoded: its rows lie at an offset of the arena until the item is released, or were delivered."""

    session: int
    key: int
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, int]
    kept: tuple[int, ...]
    report: ItemReport
    fallback: str = ""
    """Why the rows of an item with a region were not delivered."""


class Placed(Struct, array_like=True, frozen=True, tag=8):
    """An item was encoded, and its rows were written to its region, or only cached."""

    session: int
    key: int
    dtype: str
    shape: tuple[int, int]
    kept: tuple[int, ...]
    report: ItemReport
    region: tuple[int, int] | None
    seconds: float = 0.0


class Fault(Struct, array_like=True, frozen=True, tag=2):
    """An item failed."""

    session: int
    key: int
    error: bytes


class Configure(Struct, array_like=True, frozen=True, tag=3):
    """The first message: pickled settings, and the port to listen on."""

    settings: bytes
    port: int


class Serve(Struct, array_like=True, frozen=True, tag=4):
    """The model is loaded: pickled card and footprints."""

    model: bytes
    digest_seed: int | None


class Describe(Struct, array_like=True, frozen=True, tag=11):
    """Another description of the model: a pickled card."""

    card: bytes


class Show(Struct, array_like=True, frozen=True, tag=5):
    """The state of the server."""

    state: str
    reason: str


class Spare(Struct, array_like=True, frozen=True, tag=10):
    """A block that the process may write an item's bytes into before the item is admitted."""

    offset: int
    nbytes: int


class Beat(Struct, array_like=True, frozen=True, tag=9):
    """The engine's process is alive."""


class Drain(Struct, array_like=True, frozen=True, tag=6):
    """Refuse new RPCs. Answered with Drained."""

    seconds: float


class Stop(Struct, array_like=True, frozen=True, tag=7):
    """Close the ports and exit."""


ToEngine: TypeAlias = Open | Reserve | Admit | Find | Queue | Submit | Ask | Release | Close | Started | Drained
ToRpc: TypeAlias = Reply | Rows | Placed | Fault | Configure | Serve | Describe | Show | Drain | Stop | Beat | Spare
FROM_RPC: Decoder[ToEngine] = Decoder(ToEngine)
FROM_ENGINE: Decoder[ToRpc] = Decoder(ToRpc)


def encoded_of(message: Rows, data: memoryview) -> Encoded:
    """The outcome, with its rows."""
    embedding = Embedding(data, DType.of(message.dtype), message.shape, message.kept)
    return Encoded(embedding, message.report, NotDelivered(Fallback(message.fallback)) if message.fallback else None)


def placed_of(message: Placed) -> Encoded:
    """The outcome of an item whose rows were delivered or stored."""
    embedding = Embedding(memoryview(b""), DType.of(message.dtype), message.shape, message.kept)
    delivery = Delivered(Region(*message.region), message.seconds) if message.region else Stored()
    return Encoded(embedding, message.report, delivery)


def pickled(error: EncoderError) -> bytes:
    """An error as it is sent."""
    return pickle.dumps(error)


def unpickled(raw: bytes, kind: type[T]) -> T:
    """What the other process pickled; both trust each other, as one started the other."""
    value = pickle.loads(raw)  # noqa: S301 - see above
    assert isinstance(value, kind)
    return value
