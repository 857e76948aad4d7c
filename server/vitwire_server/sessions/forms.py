"""Items and consumers as they pass between processes."""

from msgspec import Struct

from vitwire_server.core.delivery import Consumer, MemoryKind, Region
from vitwire_server.core.grids import Footprint, Grid
from vitwire_server.core.items import CacheLookup, DType, Item, Modality, Pixels


class TensorForm(Struct, array_like=True, frozen=True):
    """Type and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]


class ItemForm(Struct, array_like=True, frozen=True, tag="i"):
    """An item without its bytes."""

    modality: Modality
    grid: tuple[int, int, int]
    footprint: tuple[int, int, int, int, int, int]
    pixels: TensorForm
    crops: TensorForm | None
    output: str
    keep_ratio: float
    content_id: str
    region: tuple[int, int] | None
    on_device: bool
    store_only: bool
    is_picture: bool


class LookupForm(Struct, array_like=True, frozen=True, tag="l"):
    """An item without pixels."""

    content_id: str
    modality: Modality | None
    grid: tuple[int, int, int] | None
    output: str
    keep_ratio: float
    region: tuple[int, int] | None
    store_only: bool


class ConsumerForm(Struct, array_like=True, frozen=True):
    """A consumer; its principal is that of the session."""

    agent: str
    metadata: bytes
    memory: str
    device: int
    address: int
    nbytes: int


def form_of(item: Item | CacheLookup) -> ItemForm | LookupForm:
    """An item as it is sent."""
    if isinstance(item, CacheLookup):
        output, region = item.output.label, _pair(item.region)
        return LookupForm(item.content_id, item.modality, item.grid, output, item.keep_ratio, region, item.store_only)
    return ItemForm(
        item.modality,
        item.grid,
        item.footprint,
        _form(item.pixels),
        _form(item.crops) if item.crops else None,
        item.output.label,
        item.keep_ratio,
        item.content_id,
        _pair(item.region),
        item.on_device,
        item.store_only,
        item.is_picture,
    )


def consumer_form_of(consumer: Consumer) -> ConsumerForm:
    """A consumer as it is sent."""
    memory = consumer.memory.value
    return ConsumerForm(consumer.agent, consumer.metadata, memory, consumer.device, consumer.address, consumer.nbytes)


def consumer_of(form: ConsumerForm, principal: str) -> Consumer:
    """The consumer of a principal."""
    memory = MemoryKind(form.memory)
    return Consumer(principal, form.agent, form.metadata, memory, form.device, form.address, form.nbytes)


def item_of(form: ItemForm) -> Item:
    """The item, without its bytes."""
    return Item(
        form.modality,
        Grid(*form.grid),
        _pixels(form.pixels),
        Footprint(*form.footprint),
        DType.of(form.output),
        form.keep_ratio,
        _pixels(form.crops) if form.crops else None,
        form.content_id,
        Region(*form.region) if form.region else None,
        on_device=form.on_device,
        store_only=form.store_only,
        is_picture=form.is_picture,
    )


def lookup_of(form: LookupForm) -> CacheLookup:
    """The item without pixels."""
    grid = Grid(*form.grid) if form.grid else None
    region = Region(*form.region) if form.region else None
    output = DType.of(form.output)
    return CacheLookup(form.content_id, form.modality, grid, output, form.keep_ratio, region, form.store_only)


def _pair(region: Region | None) -> tuple[int, int] | None:
    return (region.offset, region.nbytes) if region else None


def _form(pixels: Pixels) -> TensorForm:
    return TensorForm(pixels.dtype.label, pixels.shape)


def _pixels(form: TensorForm) -> Pixels:
    return Pixels(b"", DType.of(form.dtype), form.shape)
