"""What a client may send to towers of tiles, with crops and of looked-up positions, and what is said of the rest."""

from dataclasses import replace

import pytest

from vitwire import wire
from vitwire.v1 import encoder_pb2 as pb
from vitwire_server.core.budgets import Ladder
from vitwire_server.core.errors import InvalidRequest
from vitwire_server.core.geometries import ResampledGeometry
from vitwire_server.core.grids import Footprint, Grid
from vitwire_server.core.items import DType, Item, Modality
from vitwire_server.core.models import ClipGeometry, Geometry, Limits, ModelCard, Preprocessing, TileGeometry
from vitwire_server.rpc.codec import Codec

TILES = TileGeometry(patch=2, merge=1, temporal=1, channels=3, width=8, levels=0, tile=(4, 6))
PAIRS = replace(TILES, crop=(8, 8))
CROPS = replace(TILES, crop=(2, 2), crops_replace=True)
TABLE = Geometry(patch=2, merge=3, temporal=1, channels=3, width=8, levels=0, raster=True, longest_side=12)
BOTH = dict.fromkeys(Modality, Preprocessing(1, 64, (0.5,) * 3, (0.5,) * 3, 1 / 255, 3))
IMAGES = {Modality.IMAGE: BOTH[Modality.IMAGE]}


def codec(geometry: Geometry, preprocessing: dict[Modality, Preprocessing] = BOTH) -> Codec:
    limits = Limits(1 << 20, items_per_request=3, patches_per_item=60, queued_items=9, queued_bytes=1 << 20)
    card = ModelCard(
        "tiny", "tiles", "", DType.BFLOAT16, geometry, preprocessing, Ladder(), {}, limits, "off", "sdpa", "cpu", "0"
    )
    return Codec(card, lambda grid: Footprint(grid.t, 2 * grid.t, grid.t, 6))


def tensor(*shape: int, data_type: "pb.DataType.ValueType" = pb.DATA_TYPE_UINT8) -> pb.Tensor:
    return pb.Tensor(data_type=data_type, shape=shape)


def item(
    grid: tuple[int, int, int], pixels: pb.Tensor, crops: pb.Tensor | None = None, *, video: bool = False
) -> pb.Item:
    modality = pb.MODALITY_VIDEO if video else pb.MODALITY_IMAGE
    t, h, w = grid
    return pb.Item(modality=modality, grid=pb.Grid(t=t, h=h, w=w), pixels=pixels, crops=crops)


def described(rules: Codec, message: pb.Item) -> Item:
    header = rules.header("item", message, DType.FLOAT32)
    assert isinstance(header, Item)
    return header


def violated(rules: Codec, message: pb.Item) -> set[str]:
    with pytest.raises(InvalidRequest) as wrong:
        described(rules, message)
    return {violation.field.removeprefix("item.") for violation in wrong.value.violations}


@pytest.mark.parametrize(("grid", "video"), [
    *((grid, False) for grid in ((1, 1, 1), (2, 1, 1), (9, 1, 1), (6, 2, 3), (7, 3, 2))), ((5, 1, 1), True),
])  # fmt: skip
def test_tiles_of_images_and_frames_of_clips_are_taken(grid: tuple[int, int, int], video: bool) -> None:
    tiles = grid[0]
    header = described(codec(TILES), item(grid, tensor(tiles, 3, 4, 6), video=video))
    assert header.nbytes == tiles * 72
    assert header.footprint.tokens == 2 * tiles


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        (item((3, 1, 1), tensor(4, 3, 4, 6)), {"pixels.shape"}),
        (item((4, 1, 2), tensor(4, 3, 4, 6)), {"grid.t"}),
        (item((5, 2, 3), tensor(5, 3, 4, 6)), {"grid.t"}),
        (item((6, 2, 3), tensor(6, 3, 4, 6), video=True), {"grid"}),
        (item((0, 1, 1), tensor(0, 3, 4, 6)), {"grid.t"}),
        (item((11, 2, 5), tensor(11, 3, 4, 6)), {"grid"}),  # 66 patches
        (item((4294967295, 1, 4294967295), tensor(1, 3, 4, 6)), {"grid"}),
        (item((2, 1, 2), tensor(2, 3, 6, 4)), {"pixels.shape"}),
        (item((2, 1, 2), tensor(1, 3, 4, 6)), {"pixels.shape"}),
        (item((2, 1, 2), tensor(2, 72)), {"pixels.shape"}),
        (item((2, 1, 2), tensor(2, 3, 4, 6, data_type=pb.DATA_TYPE_UNSPECIFIED)), {"pixels.data_type"}),
        (item((1, 1, 1), tensor(1, 3, 4, 6), tensor(1, 3, 2, 2)), {"crops"}),
    ],
)
def test_wrong_tiles_are_named(message: pb.Item, fields: set[str]) -> None:
    assert violated(codec(TILES), message) == fields


def test_two_views_are_one_item() -> None:
    message = item((3, 1, 2), tensor(1, 3, 4, 6), tensor(2, 3, 2, 2))
    data = bytes(range(72)), bytes(range(24))
    request = wire.Request(pb.EncodeRequest(items=[message]), [wire.ItemTensors(*data)])
    (whole,) = codec(CROPS, IMAGES).items(request)
    header = described(codec(CROPS, IMAGES), message)
    unknown = item((3, 1, 1), tensor(1, 3, 4, 6), tensor(2, 3, 2, 2))
    assert described(codec(CROPS, IMAGES), unknown).footprint == header.footprint
    chunked = header.filled(memoryview(b"".join(data)))
    assert header.nbytes == 96
    for own in (whole, chunked):
        assert isinstance(own, Item)
        assert own.crops is not None
        assert (bytes(own.pixels.data), bytes(own.crops.data)) == data
        assert own.crops.shape == (2, 3, 2, 2)
    rows = 6 * 8 * 4
    assert header.weight(width=8) == chunked.weight(width=8) == 96 + rows


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        (item((3, 1, 2), tensor(1, 3, 4, 6)), {"crops"}),
        (item((1, 1, 1), tensor(1, 3, 4, 6), tensor(1, 3, 2, 2)), {"crops"}),
        (item((3, 1, 2), tensor(3, 3, 4, 6), tensor(2, 3, 2, 2)), {"pixels.shape"}),
        (item((3, 1, 2), tensor(1, 3, 4, 6), tensor(3, 3, 2, 2)), {"crops.shape"}),
        (
            item((3, 1, 2), tensor(1, 3, 4, 6), tensor(2, 3, 2, 2, data_type=pb.DATA_TYPE_UNSPECIFIED)),
            {"crops.data_type"},
        ),
        (item((2, 1, 2), tensor(1, 3, 4, 6), tensor(2, 3, 2, 2)), {"grid.t"}),
        (item((1, 1, 1), tensor(1, 3, 4, 6), video=True), {"modality"}),
    ],
)
def test_wrong_crops_are_named(message: pb.Item, fields: set[str]) -> None:
    assert violated(codec(CROPS, IMAGES), message) == fields


def test_bytes_of_both_views_are_counted() -> None:
    message = item((3, 1, 2), tensor(1, 3, 4, 6), tensor(2, 3, 2, 2))
    request = wire.Request(pb.EncodeRequest(items=[message]), [wire.ItemTensors(bytes(71), bytes(25))])
    with pytest.raises(InvalidRequest) as wrong:
        codec(CROPS).items(request)
    assert {violation.field for violation in wrong.value.violations} == {"items[0].pixels.data", "items[0].crops.data"}
    message.crops.data = b"early"
    assert violated(codec(CROPS), message) == {"crops.data"}


def test_every_tile_of_a_pair_has_its_other_size() -> None:
    header = described(codec(PAIRS), item((2, 1, 2), tensor(2, 3, 4, 6), tensor(2, 3, 8, 8)))
    assert header.crops is not None
    assert violated(codec(PAIRS), item((1, 1, 1), tensor(1, 3, 4, 6))) == {"crops"}


@pytest.mark.parametrize(
    ("grid", "fields"), [((1, 15, 3), {"grid.h"}), ((1, 3, 4), {"grid.w"}), ((1, 4, 15), {"grid.h", "grid.w"})]
)
def test_grids_beyond_a_table_of_positions_are_named(grid: tuple[int, int, int], fields: set[str]) -> None:
    rows = Grid(*grid).patches
    assert violated(codec(TABLE), item(grid, tensor(rows, 12))) == fields
    assert described(codec(TABLE), item((1, 12, 3), tensor(36, 12))).nbytes == 432


@pytest.mark.parametrize(
    ("grid", "fields"), [((1, 4, 6), {"grid.t"}), ((2, 3, 6), {"grid.h"}), ((2, 4, 5), {"grid.w"})]
)
def test_clips_whose_tokens_are_of_more_patches(grid: tuple[int, int, int], fields: set[str]) -> None:
    merged = codec(ClipGeometry(patch=2, merge=1, temporal=1, channels=3, width=8, levels=0, clip_merge=2))
    assert violated(merged, item(grid, tensor(Grid(*grid).patches, 12), video=True)) == fields
    assert described(merged, item((2, 4, 6), tensor(48, 12), video=True)).nbytes == 576
    assert described(merged, item((1, 3, 5), tensor(15, 12))).nbytes == 180


def test_an_image_of_a_resampler_may_have_a_single_patch() -> None:
    few = codec(ResampledGeometry(patch=2, merge=1, temporal=1, channels=3, width=8, levels=0, longest_side=4))
    assert described(few, item((1, 1, 1), tensor(1, 12))).nbytes == 12
    assert violated(few, item((1, 1, 5), tensor(5, 12))) == {"grid.w"}
