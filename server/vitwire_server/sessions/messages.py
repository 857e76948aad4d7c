"""Messages between the engine's process and RPC processes. All are of one release, so nothing is versioned."""

import pickle
from typing import TypeAlias, TypeVar

from msgspec import Struct
from msgspec.msgpack import Decoder

from vitwire_server.core.delivery import Delivered, Fallback, NotDelivered, Region, Stored
from vitwire_server.core.grids import Footprint, Grid
from vitwire_server.core.items import Areas, CacheLookup, DType, Embedding, Item, Modality, Pixels
from vitwire_server.core.reports import Encoded, ItemReport
from vitwire_server.sessions.session import Opening

T = TypeVar("T")
BEAT_SECONDS = 1.0
Tensor: TypeAlias = tuple[str, tuple[int, ...]]
"""Type and shape."""


class Message(Struct, array_like=True):
    """Base of all messages."""


class ItemForm(Message):
    """An item without its bytes, or without pixels."""

    modality: Modality | None
    grid: Grid | None
    output: str
    keep_ratio: float
    content_id: str
    region: Region | None
    store_only: bool
    tensors: tuple[Tensor, Tensor | None] | None = None
    """Pixels and crops; None for an item without pixels, which has none of the following."""
    footprint: Footprint | None = None
    on_device: bool = False
    is_picture: bool = False
    areas: Areas | None = None
    in_groups: bool = False


# -- from RPCs to the engine; `session` and `number` are chosen by the sender ----------------------


class OfSession(Message):
    session: int


class Request(OfSession):
    """Answered with a Reply."""

    number: int
    opening: Opening | None
    """Opens the session, in its first request; None in others."""


class Reserve(Request, tag=1):
    """Answered with the offset of the memory for the item's bytes."""

    key: int
    item: ItemForm


class Admit(Request, tag=2):
    """Answered with an offset for each item with pixels."""

    items: dict[int, ItemForm]


class Queue(Request, tag=3):
    """Items that have their bytes now, and their digests if the engine needs them."""

    items: list[int]
    digests: dict[int, bytes]
    regions: dict[int, tuple[Region, bool]] = {}
    """Regions, perhaps leased after the item was reserved, and whether they are on a device."""


class Submit(Request, tag=8):
    """Items whose bytes were written into spare blocks, which lie at `blocks`: admit and queue them.

    A block is in use until a Done says that it is spare again.
    """

    items: dict[int, ItemForm]
    blocks: list[int]
    digests: dict[int, bytes]


class Find(Request, tag=9):
    """Answer an item from the cache, by the digest of its content. Answered with one offset if it was cached."""

    key: int
    item: ItemForm
    digest: bytes


class Ask(Request, tag=10):
    """Answered with the microseconds until a new item of this number of tokens would be encoded."""

    tokens: int


class Release(OfSession, tag=4):
    """The item's rows are not read any more."""

    key: int


class Close(OfSession, tag=5):
    """Close a session."""


class Started(Message, tag=6):
    """The process listens, or cannot for this reason."""

    fault: str


class Serving(Message, tag=11):
    """The model is served."""


class Drained(Message, tag=7):
    """Nothing is in flight any more, or the time is over."""


# -- from the engine to RPCs -----------------------------------------------------------------------


class Reply(Message, tag=0):
    """The answer to the request of that number."""

    number: int
    offsets: list[int]
    error: bytes = b""
    """A pickled EncoderError."""


class Done(Message, tag=1):
    """An item was encoded: its rows lie at an offset of the arena until the item is released, or were delivered."""

    session: int
    key: int
    dtype: str
    shape: tuple[int, int]
    kept: tuple[int, ...]
    report: ItemReport
    offset: int = 0
    nbytes: int = 0
    delivered: Delivered | None = None
    is_stored: bool = False
    fallback: str = ""
    """The reason for not delivering the rows of an item with a region."""
    spare: int | None = None
    """Offset of the block of the item's bytes, if it may be written into again."""
    new: tuple[int, int] | None = None


class Fault(Message, tag=2):
    """An item failed."""

    session: int
    key: int
    error: bytes


class Configure(Message, tag=3):
    """The first message: pickled settings, the port to listen on, and the number of processes that share it."""

    settings: bytes
    port: int
    edges: int


class Serve(Message, tag=4):
    """The model is loaded, or has another description: pickled card and footprints."""

    model: bytes
    digest_seed: int | None


class Show(Message, tag=5):
    """The state of the server."""

    state: str
    reason: str


class Spares(Message, tag=10):
    """Blocks that the process may write items' bytes into before the items are admitted."""

    offsets: list[int]
    nbytes: int
    """Bytes of each block."""


class Beat(Message, tag=9):
    """The engine's process is alive."""


class Drain(Message, tag=6):
    """Refuse new RPCs. Answered with Drained."""

    seconds: float


class Stop(Message, tag=7):
    """Close the ports and exit."""


Requests: TypeAlias = Reserve | Admit | Find | Queue | Submit | Ask
ToEngine: TypeAlias = Requests | Release | Close | Started | Serving | Drained
ToSession: TypeAlias = Reply | Done | Fault | Spares
Control: TypeAlias = Configure | Serve | Show | Drain | Stop
ToRpc: TypeAlias = ToSession | Control | Beat
FROM_RPC: Decoder[list[ToEngine]] = Decoder(list[ToEngine])
FROM_ENGINE: Decoder[list[ToRpc]] = Decoder(list[ToRpc])


def form_of(item: Item | CacheLookup) -> ItemForm:
    """An item as it is sent."""
    label, named = item.output.label, (item.content_id, item.region, item.store_only)
    if isinstance(item, CacheLookup):
        return ItemForm(item.modality, item.grid, label, item.keep_ratio, *named)
    crops = (item.crops.dtype.label, item.crops.shape) if item.crops else None
    tensors = (item.pixels.dtype.label, item.pixels.shape), crops
    form = ItemForm(item.modality, item.grid, label, item.keep_ratio, *named, tensors)
    form.footprint, form.on_device = item.footprint, item.on_device
    form.is_picture, form.areas, form.in_groups = item.is_picture, item.areas, item.in_groups
    return form


def item_of(form: ItemForm) -> Item:
    """The item, without its bytes."""
    assert form.modality and form.grid and form.tensors and form.footprint, "it has pixels"  # noqa: PT018
    pixels, crops = form.tensors
    return Item(
        form.modality,
        form.grid,
        Pixels(b"", DType.of(pixels[0]), pixels[1]),
        form.footprint,
        DType.of(form.output),
        form.keep_ratio,
        Pixels(b"", DType.of(crops[0]), crops[1]) if crops else None,
        form.content_id,
        form.region,
        on_device=form.on_device,
        store_only=form.store_only,
        is_picture=form.is_picture,
        areas=form.areas,
        in_groups=form.in_groups,
    )


def received(form: ItemForm) -> Item | CacheLookup:
    """The item, without its bytes, or without pixels."""
    if form.tensors:
        return item_of(form)
    output, named = DType.of(form.output), (form.region, form.store_only)
    return CacheLookup(form.content_id, form.modality, form.grid, output, form.keep_ratio, *named)


def encoded_of(message: Done, data: memoryview) -> Encoded:
    """The outcome, with the rows that are returned."""
    not_delivered = NotDelivered(Fallback(message.fallback)) if message.fallback else None
    delivery = Stored() if message.is_stored else message.delivered or not_delivered
    rows = Embedding(data, DType.of(message.dtype), message.shape, message.kept)
    return Encoded(rows, message.report, delivery, message.new)


def unpickled(raw: bytes, kind: type[T]) -> T:
    """Unpickle a message of the other process; both trust each other, as one started the other."""
    value = pickle.loads(raw)  # noqa: S301 - see above
    assert isinstance(value, kind)
    return value
