"""What a client may send, and what is said of the rest."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cards
from prepared import recipe, tiled
from vitwire import wire
from vitwire.v1 import encoder_pb2 as pb
from vitwire_server.caching.cache import Content, EmbeddingCache, Key, Name, nbytes_of
from vitwire_server.core.budgets import Ladder, budget
from vitwire_server.core.errors import InvalidRequest
from vitwire_server.core.grids import Footprint, Grid
from vitwire_server.core.items import CacheLookup, DType, Embedding, Item, Modality
from vitwire_server.core.models import Encoding, ModelCard, Place, Preparation, Preprocessing, Resizing
from vitwire_server.core.tilings import Tiling, TilingRule
from vitwire_server.preparing.files.messages import MOST_FRAMES, Measured
from vitwire_server.rpc.codec import Codec, parsed
from vitwire_server.rpc.file_items import Unprepared
from vitwire_server.rpc.response_messages import model_message
from vitwire_server.sessions.messages import form_of, item_of

GEOMETRY = cards.CARD.geometry
SINGLE, FULL = GEOMETRY.columns(frames=1), GEOMETRY.columns(frames=2)
PREPROCESSING = dict.fromkeys(Modality, Preprocessing(1, 64, (0.5,) * 3, (0.5,) * 3, 1 / 255, 3))
CARD = replace(cards.CARD, dtype=DType.BFLOAT16, preprocessing=PREPROCESSING)
CODEC = Codec(CARD, lambda grid: Footprint(grid.patches, grid.patches // 4, grid.t, grid.frame_patches))


def message(**changes: object) -> pb.Item:
    """A correct image of 4 x 2 patches, with some fields changed."""
    item = pb.Item(
        modality=pb.MODALITY_IMAGE,
        grid=pb.Grid(t=1, h=4, w=2),
        pixels=pb.Tensor(data_type=pb.DATA_TYPE_UINT8, shape=[8, SINGLE]),
    )
    for path, value in changes.items():
        target, _, name = path.rpartition("__")
        owner = getattr(item, target) if target else item
        if name == "shape":
            del owner.shape[:]
            owner.shape.extend(value)
        elif value is None:
            owner.ClearField(name)
        elif isinstance(value, pb.Tensor):
            getattr(owner, name).CopyFrom(value)
        else:
            setattr(owner, name, value)
    return item


ENCODED = Codec(
    replace(CARD, limits=replace(CARD.limits, encoded_bytes=100, encoded_pixels=1000), encodings=tuple(Encoding)),
    CODEC._footprints,
)


def file_request(item: pb.Item, data: bytes = b"file") -> wire.Request:
    return wire.Request(pb.EncodeRequest(items=[item]), [wire.ItemTensors(encoded=data)])


@pytest.mark.parametrize(
    ("item", "data", "wrong"),
    [
        (pb.Item(modality=pb.MODALITY_IMAGE), bytes(101), {"items[0].encoded"}),
        (pb.Item(), b"file", {"items[0].modality"}),
        (pb.Item(modality=9), b"file", {"items[0].modality"}),
        (message(), b"file", {"items[0].encoded", "items[0].grid"}),
        (pb.Item(modality=pb.MODALITY_IMAGE, keep_ratio=0.5), b"file", {"items[0].keep_ratio"}),
        (pb.Item(modality=pb.MODALITY_IMAGE, content_id="x" * 513), b"file", {"items[0].content_id"}),
    ],
)
def test_files_are_checked_before_they_are_read(item: pb.Item, data: bytes, wrong: set[str]) -> None:
    with pytest.raises(InvalidRequest) as error:
        ENCODED.items(file_request(item, data))
    assert {violation.field for violation in error.value.violations} == wrong
    with pytest.raises(InvalidRequest) as error:
        ENCODED.unprepared("items[0]", item, len(data), DType.FLOAT32)
    assert {violation.field for violation in error.value.violations} == wrong


def test_a_server_that_decodes_nothing_refuses_files() -> None:
    with pytest.raises(InvalidRequest, match="this server prepares no files; send pixels"):
        CODEC.items(file_request(pb.Item(modality=pb.MODALITY_IMAGE)))


def test_a_measured_file_is_checked_as_pixels_are() -> None:
    sent = pb.Item(modality=pb.MODALITY_IMAGE, content_id="name")
    (item,) = ENCODED.items(file_request(sent))
    assert isinstance(item, Unprepared)
    assert bytes(item.data) == b"file"
    found = ENCODED.measured("items[4]", item, Measured((1, 4, 2), (8, SINGLE), None, cost=0), None)
    assert (found.grid, found.content_id, found.nbytes) == (Grid(1, 4, 2), "name", 8 * SINGLE)
    with pytest.raises(InvalidRequest, match=r"items\[4\].grid: has 128 patches, at most 64"):
        ENCODED.measured("items[4]", item, Measured((1, 8, 16), (128, SINGLE), None, cost=0), None)


def request(*items: pb.Item, data: bytes = bytes(8 * SINGLE), **options: int) -> wire.Request:
    return wire.Request(pb.EncodeRequest(items=items, **options), [wire.ItemTensors(data)] * len(items))


def violated(sent: wire.Request) -> set[str]:
    with pytest.raises(InvalidRequest) as wrong:
        CODEC.items(sent)
    return {violation.field for violation in wrong.value.violations}


def test_a_correct_item_is_viewed_and_not_copied() -> None:
    data = bytes(range(8 * SINGLE))
    (item,) = CODEC.items(request(message(), data=data))
    assert isinstance(item, Item)
    assert item.pixels.data is data
    assert (item.modality, item.grid, item.output) == (Modality.IMAGE, Grid(1, 4, 2), DType.BFLOAT16)
    assert item.footprint == Footprint(8, 2, 1, 8)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"modality": pb.MODALITY_UNSPECIFIED}, "modality"),
        ({"modality": 77}, "modality"),
        *(({f"grid__{side}": 0}, f"grid.{side}") for side in "thw"),
        ({"grid": None}, "grid"),
        ({"grid__h": 3}, "grid.h"),
        ({"grid__w": 5}, "grid.w"),
        ({"grid__t": 2}, "grid.t"),
        ({"grid__h": 4294967294, "grid__w": 4294967294}, "grid"),
        ({"grid__h": 66, "grid__w": 2}, "grid"),
        ({"pixels": None}, "pixels.data_type"),
        ({"pixels__data_type": 0}, "pixels.data_type"),
        ({"pixels__data_type": 99}, "pixels.data_type"),
        ({"pixels__data_type": pb.DATA_TYPE_FLOAT32}, "pixels.data"),
        *(
            ({"pixels__shape": shape}, "pixels.shape")
            for shape in ([8, SINGLE + 1], [9, SINGLE], [8 * SINGLE], [1 << 63] * 9, [])
        ),
        ({"modality": pb.MODALITY_VIDEO}, "pixels.shape"),
        ({"crops": pb.Tensor(data_type=pb.DATA_TYPE_UINT8)}, "crops"),
        *(({"keep_ratio": ratio}, "keep_ratio") for ratio in (0.5, 1.0, nan)),
        *(
            ({"modality": pb.MODALITY_VIDEO, "pixels__shape": [8, FULL], "keep_ratio": ratio}, "keep_ratio")
            for ratio in (-0.1, 1.5, inf, nan)
        ),
        ({"content_id": "x" * 513}, "content_id"),
    ],
)
def test_each_wrong_field_is_named(changes: dict[str, object], field: str) -> None:
    assert f"items[1].{field}" in violated(request(message(), message(**changes)))


def test_a_header_that_repeats_is_checked_once_and_never_shared() -> None:
    count = 0

    def footprint(grid: Grid) -> Footprint:
        nonlocal count
        count += 1
        return CODEC._footprints(grid)

    codec, size = Codec(CARD, footprint), 8 * SINGLE
    unknown = pb.Item.FromString(message().SerializeToString() + b"\xfa\x01\xff\x01" + bytes(255))
    unusual = message(content_id="x"), message(content_id="y"), unknown, unknown
    for one in (message(), message(), *unusual):
        for byte in b"ab":
            data = bytes([byte]) * size
            (item,) = codec.items(wire.Request(pb.EncodeRequest(items=[one]), [wire.ItemTensors(data)]))
            assert isinstance(item, Item)
            assert item.pixels.data == data
            assert item.content_id == one.content_id
    assert count == 1 + 2 * len(unusual)
    with pytest.raises(InvalidRequest, match="has 3 bytes"):
        codec.items(wire.Request(pb.EncodeRequest(items=[message()]), [wire.ItemTensors(b"abc")]))


def test_wrong_options_and_counts_are_named() -> None:
    """All that is wrong at once."""
    assert violated(request()) == {"items"}
    assert violated(request(*[message()] * 4)) == {"items"}
    assert violated(request(message(), output_type=pb.DATA_TYPE_UINT8)) == {"output_type"}
    assert violated(request(message(), output_type=55)) == {"output_type"}
    assert violated(request(message(), priority=7)) == {"priority"}
    both = request(message(grid__h=3), message(modality=9, grid__w=0))
    assert violated(both) == {"items[0].grid.h", "items[1].modality", "items[1].grid.w"}
    assert violated(request(message(), data=bytes(5))) == {"items[0].pixels.data"}


SIZED = replace(
    CARD,
    limits=replace(CARD.limits, encoded_bytes=100, encoded_pixels=10_000, cached_bytes=10_000),
    prepared=tuple(Modality),
    preparation=Preparation(Place.DEVICE, None),
    preprocessing=dict.fromkeys(Modality, replace(PREPROCESSING[Modality.IMAGE], min_pixels=16)),
)
MOST = SIZED.limits.patches_per_item * GEOMETRY.row // 3
PICTURE = pb.Tensor(data_type=pb.DATA_TYPE_UINT8, shape=[40, 40, 3])


def optioned(card: ModelCard, item: pb.Item, **options: Any) -> Item | CacheLookup | Unprepared:
    sent = pb.Item(options=pb.ProcessorOptions(**options))
    sent.MergeFrom(item)
    codec, nbytes = Codec(card, CODEC._footprints), 0 if item.HasField("pixels") or item.content_id else 4
    if codec.is_unprepared(sent, nbytes):
        return codec.unprepared("items[0]", sent, nbytes, DType.FLOAT32)
    return codec.header("items[0]", sent, DType.FLOAT32)


@pytest.mark.parametrize(
    ("item", "options", "wrong"),
    [
        (pb.Item(modality=1), {"max_pixels": 0}, "options.max_pixels"),
        (pb.Item(modality=1), {"min_pixels": -1}, "options.min_pixels"),
        (pb.Item(modality=1), {"max_pixels": -(1 << 63)}, "options.max_pixels"),
        (pb.Item(modality=1), {"min_pixels": 9, "max_pixels": 8}, "options.max_pixels"),
        (pb.Item(modality=1), {"min_pixels": MOST + 1}, "options.min_pixels"),
        (pb.Item(modality=1), {"min_pixels": (1 << 63) - 1, "max_pixels": (1 << 63) - 1}, "options.min_pixels"),
        (pb.Item(modality=1, options=pb.ProcessorOptions.FromString(b"\x20\x01")), {}, "options"),
        (pb.Item(modality=2), {"max_pixels": 99}, "options"),
        (pb.Item(modality=1, content_id="cat"), {"max_pixels": 99}, "options"),
        (message(), {"max_pixels": 99}, "options"),
        (pb.Item(modality=1), {"frames": [1]}, "options"),
    ],
)
def test_wrong_options_of_the_processor_are_named(item: pb.Item, options: dict[str, Any], wrong: str) -> None:
    items = [item, pb.Item(modality=1, pixels=PICTURE)] if wrong != "options" else [item]
    for each in items:
        with pytest.raises(InvalidRequest) as error:
            optioned(SIZED, each, **options)
        assert f"items[0].{wrong}" in {violation.field for violation in error.value.violations}


@pytest.mark.parametrize(
    ("card", "options"),
    [
        (replace(SIZED, prepared=()), ()),
        (replace(SIZED, preprocessing={Modality.IMAGE: tiled(Tiling(TilingRule.STRETCH, (8, 8))).settings}), ()),
        (replace(SIZED, preprocessing={Modality.IMAGE: recipe(resizing=Resizing.LONGEST_SIDE).settings}), ()),
        (SIZED, ("min_pixels", "max_pixels")),
    ],
)
def test_a_server_names_its_options_and_refuses_others(card: ModelCard, options: tuple[str, ...]) -> None:
    assert tuple(model_message(card).options) == options
    file = pb.Item(modality=pb.MODALITY_IMAGE)
    with nullcontext() if options else pytest.raises(InvalidRequest, match=r"\.options\.max_pixels: is not an option"):
        optioned(card, file, max_pixels=99)


@pytest.mark.parametrize("frames", [[1, 1], range(MOST_FRAMES + 1), [3]])
def test_wrong_frames_are_named(frames: Sequence[int]) -> None:
    """The last ones are right, for a server that decodes clips."""
    clips = SIZED if frames == [3] else replace(SIZED, encodings=(Encoding.MP4,))
    assert "frames" in replace(SIZED, encodings=(Encoding.MP4,)).options
    with pytest.raises(InvalidRequest, match=r"items\[0\]\.options\.frames"):
        optioned(clips, pb.Item(modality=pb.MODALITY_VIDEO), frames=frames)


def test_options_set_the_grid_of_a_picture() -> None:
    sent = pb.Item(modality=pb.MODALITY_IMAGE, pixels=PICTURE)
    usual, larger, largest = (optioned(SIZED, sent, **each) for each in ({}, {"max_pixels": 144}, {"min_pixels": 225}))
    assert [each.grid for each in (usual, larger) if isinstance(each, Item)] == [Grid(1, 4, 4), Grid(1, 6, 6)]
    assert isinstance(largest, Item)
    assert [each.areas for each in (usual, larger, largest)] == [None, (16, 144), (225, 64)]
    assert item_of(form_of(largest)).areas == (225, 64)
    with pytest.raises(InvalidRequest, match=r"items\[0\].grid: has 400 patches, at most 64"):
        optioned(SIZED, sent, max_pixels=(1 << 63) - 1)


def test_a_cached_embedding_is_asked_for_without_pixels() -> None:
    sent = wire.Request(pb.EncodeRequest(items=[pb.Item(content_id="cat")]), [wire.ItemTensors()])
    (item,) = CODEC.items(sent)
    assert item == CacheLookup("cat", None, None, CODEC.items(request(message()))[0].output, 0.0)
    described = pb.Item(content_id="cat", modality=pb.MODALITY_VIDEO, grid=pb.Grid(t=2, h=4, w=6), keep_ratio=0.5)
    asked = CODEC.header("items[0]", described, DType.FLOAT16)
    assert asked == CacheLookup("cat", Modality.VIDEO, Grid(2, 4, 6), DType.FLOAT16, 0.5)


@pytest.mark.parametrize(
    ("ratio", "rows"), [(0.0, 10), (1.0, 10), (0.7, 7), (0.3, 3), (0.29, 2), (0.01, 1), (1e-45, 1)]
)
def test_videos_may_be_pruned_to_a_share_of_their_tokens(ratio: float, rows: int) -> None:
    clip = message(
        modality=pb.MODALITY_VIDEO, grid__t=10, grid__h=2, grid__w=2, pixels__shape=[40, FULL], keep_ratio=ratio
    )
    header = CODEC.header("items[0]", clip, DType.FLOAT32)
    assert isinstance(header, Item)
    item = header.filled(memoryview(bytes(header.nbytes)))
    assert item.keep_ratio == (ratio if 1e-40 < ratio < 1 else pytest.approx(0))
    assert (header.rows, item.rows, item.footprint.tokens) == (rows, rows, 10)
    pixels = 40 * FULL
    assert header.weight(width=8) == item.weight(width=8) == pixels + rows * 8 * 4


def test_a_header_must_leave_its_bytes_out() -> None:
    header = CODEC.header("items[4]", message(), DType.FLOAT32)
    assert header.nbytes == 8 * SINGLE
    with pytest.raises(InvalidRequest, match=r"items\[4\]\.pixels\.data"):
        CODEC.header("items[4]", message(pixels__data=b"123"), DType.FLOAT32)


def _messages() -> st.SearchStrategy[pb.Item]:
    numbers = st.sampled_from([0, 1, 2, 3, 4, 8, 64, 1 << 16, (1 << 32) - 1])
    tensors = st.builds(
        pb.Tensor,
        data_type=st.integers(0, 9),
        shape=st.lists(st.sampled_from([0, 1, 8, SINGLE, FULL, (1 << 64) - 1]), max_size=4),
    )
    return st.builds(
        pb.Item,
        modality=st.integers(0, 5),
        grid=st.builds(pb.Grid, t=numbers, h=numbers, w=numbers),
        content_id=st.text(max_size=3),
        keep_ratio=st.floats(width=32),
        crops=st.none() | tensors,
        pixels=st.none() | tensors,
    )


@given(st.lists(_messages(), max_size=4), st.binary(max_size=200), st.integers(0, 9), st.integers(0, 9))
def test_whatever_is_accepted_has_the_bytes_it_promises(
    items: list[pb.Item], data: bytes, output: int, priority: int
) -> None:
    sent = request(*items, data=data, output_type=output, priority=priority)
    try:
        accepted = CODEC.items(sent)
    except InvalidRequest as wrong:
        assert wrong.violations
        return
    for item in accepted:
        if isinstance(item, Item):
            assert item.pixels.nbytes == len(item.pixels.data) > 0
            assert item.grid.patches <= CARD.limits.patches_per_item


def _mutate(draw: st.DrawFn, raw: bytes) -> bytes:
    changed = bytearray(raw)
    for _ in range(draw(st.integers(1, 4))):
        if changed:
            changed[draw(st.integers(0, len(changed) - 1))] = draw(st.integers(0, 255))
    return bytes(changed[: draw(st.integers(0, len(changed)))])


@given(st.data(), st.sampled_from([wire.read_request, lambda raw: wire.read_chunk(pb.EncodeStreamRequest, raw)]))
def test_no_bytes_get_past_the_codec_but_as_an_error_it_names(
    data: st.DataObject, read: Callable[[bytes], wire.Request | wire.Frame[pb.EncodeStreamRequest] | wire.Malformed]
) -> None:
    whole = wire.write_request(request(message(), message(content_id="cat")))
    raw = _mutate(data.draw, whole) if data.draw(st.booleans()) else data.draw(st.binary(max_size=60))
    outcome = read(raw)
    try:
        parsed(outcome)
        if isinstance(outcome, wire.Request):
            CODEC.items(outcome)
    except InvalidRequest as wrong:
        assert all(violation.field for violation in wrong.violations)


@pytest.mark.parametrize("room", [0, 1])
def test_what_is_only_stored_fits_the_cache(room: int) -> None:
    """With its name and all else that it takes there: else it would be answered as stored, and not be found."""
    name, most = Name("", "", DType.BFLOAT16, 0.0, "stored"), nbytes_of(32, "stored") - 1 + room
    cache = EmbeddingCache(most)
    key = Key("", "", DType.BFLOAT16, 0.0, Content(Modality.IMAGE, Grid(1, 4, 2), (), b""))
    cache.put(key, Embedding(memoryview(bytes(32)), DType.BFLOAT16, (2, 8)), {name})
    assert (cache.find(name) is not None) == room
    codec = Codec(replace(CARD, limits=replace(CARD.limits, cached_bytes=most)), CODEC._footprints)
    with nullcontext() if room else pytest.raises(InvalidRequest, match=r"items\[0\].store_only: the rows would take"):
        codec.items(request(message(content_id="stored", store_only=True)))


def test_the_model_names_the_attention_of_each_budget_and_what_is_unavailable() -> None:
    large = budget(784, merge=2, max_items=64, max_frames=512)
    short = replace(large, max_segment_patches=256)
    card = replace(
        CARD,
        ladder=Ladder((short, large)),
        backends={short: "triton", large: "fa4"},
        unavailable={"hopper": "it has kernels for compute capability 9.x, the device has 8.0"},
    )
    model = model_message(card)
    assert [(each.tokens, each.segment_patches, each.attention_backend) for each in model.budgets] == [
        (784, 256, "triton"),
        (784, 3136, "fa4"),
    ]
    assert [(each.feature, each.reason) for each in model.unavailable] == list(card.unavailable.items())
    assert [each.attention_backend for each in model_message(replace(card, backends={})).budgets] == ["sdpa", "sdpa"]
