"""Items on their way out, embeddings on their way in."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from client_models import described
from vitwire import Embedding, InvalidItem, Item, ProcessorOptions
from vitwire._transport.uploads import to_wire
from vitwire.content_ids import content_id
from vitwire.embeddings import STORAGE, Report
from vitwire.items import without_pixels
from vitwire.v1 import encoder_pb2 as pb

PIXELS = np.arange(48, dtype=np.float32).reshape(8, 6)
GRID = (1, 4, 2)


@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32"])
def test_numpy_travels_as_it_is(dtype: str) -> None:
    pixels = PIXELS.astype(dtype)
    wire = to_wire(Item(pixels, GRID))
    assert bytes(wire.tensors.pixels) == pixels.tobytes()
    assert wire.message.pixels.data_type == pb.DataType.Value(f"DATA_TYPE_{dtype.upper()}")
    assert list(wire.message.pixels.shape) == [8, 6]
    assert np.shares_memory(np.frombuffer(wire.tensors.pixels, np.uint8), pixels)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_torch_travels_bit_by_bit_without_a_copy(dtype: torch.dtype) -> None:
    pixels = torch.randn(8, 6).mul(100).to(dtype).requires_grad_(dtype.is_floating_point)
    wire = to_wire(Item(pixels, GRID))
    assert bytes(wire.tensors.pixels) == bytes(pixels.detach().view(torch.uint8).numpy())
    assert wire.message.pixels.data_type == pb.DataType.Value(f"DATA_TYPE_{str(dtype)[6:].upper()}")
    assert np.shares_memory(np.frombuffer(wire.tensors.pixels, np.uint8), pixels.detach().view(torch.uint8).numpy())


def test_any_order_of_bytes_and_axes_travels_in_c_order_little_endian() -> None:
    for pixels in (PIXELS.astype(">f4"), np.asfortranarray(PIXELS), np.repeat(PIXELS, 2, axis=1)[:, ::2]):
        assert bytes(to_wire(Item(pixels, GRID)).tensors.pixels) == PIXELS.tobytes()
    tensor = torch.from_numpy(PIXELS.T.copy()).T
    assert bytes(to_wire(Item(tensor, GRID)).tensors.pixels) == PIXELS.tobytes()


def test_everything_else_of_an_item_travels() -> None:
    crops = PIXELS.astype(np.uint8).reshape(2, 2, 4, 3)
    wire = to_wire(Item(PIXELS, np.array(GRID), "video", "id", 0.5, crops))
    message = wire.message
    assert (message.modality, message.content_id, message.keep_ratio) == (pb.MODALITY_VIDEO, "id", 0.5)
    assert (message.grid.t, message.grid.h, message.grid.w) == GRID
    assert list(message.crops.shape) == [2, 2, 4, 3]
    assert bytes(wire.tensors.crops) == crops.tobytes()
    assert wire.size == PIXELS.nbytes + crops.nbytes


def test_an_item_may_name_its_content_only() -> None:
    wire = to_wire(Item(None, GRID, content_id="seen"))
    assert not wire.message.HasField("pixels")
    assert wire.size == 0


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ((PIXELS.astype(np.float64), GRID), "pixels"),
        ((torch.zeros(8, 6, dtype=torch.int64), GRID), "pixels"),
        (([[1.0]], GRID), "pixels"),
        ((PIXELS.ravel(), GRID), "pixels"),
        ((None, GRID), "pixels"),
        ((PIXELS, (1, 4)), "grid"),
        ((PIXELS, (1, 0, 2)), "grid.h"),
        ((PIXELS, (1, 4, 2.5)), "grid"),
        ((PIXELS, "abc"), "grid"),
        ((PIXELS, (1, 4, float("nan"))), "grid"),
        ((PIXELS, None), "grid"),
        ((PIXELS, (2**32, 4, 2)), "grid.t"),
        ((PIXELS, GRID, "audio"), "modality"),
        ((PIXELS, GRID, "video", None, 1.5), "keep_ratio"),
        ((PIXELS, GRID, "video", None, float("nan")), "keep_ratio"),
        ((PIXELS, GRID, "image", None, 0.0, PIXELS.astype(np.int8)), "crops"),
    ],
)
def test_what_is_wrong_is_named_at_once(arguments: tuple[Any, ...], field: str) -> None:
    with pytest.raises(InvalidItem, match=field.replace(".", r"\.")) as raised:
        Item(*arguments)
    assert [each.field for each in raised.value.violations] == [field]
    assert raised.value.code == "INVALID_ARGUMENT"


def test_items_are_frozen() -> None:
    with pytest.raises(AttributeError):
        Item(PIXELS, GRID).grid = (1, 2, 2)


def embedding(rows: torch.Tensor, levels: int = 2) -> Embedding:
    name: Any = str(rows.dtype).removeprefix("torch.")
    held = rows.view(torch.uint16) if name == "bfloat16" else rows
    assert held.numpy().dtype == np.dtype(STORAGE[name])
    return Embedding(held.numpy(), name, levels, Report())


BITS = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).reshape(-1, 64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_embeddings_widen_exactly(dtype: torch.dtype) -> None:
    rows = BITS if dtype == torch.bfloat16 else torch.randn(5, 12).to(dtype)
    got = embedding(rows)
    assert got.numpy().dtype == np.float32
    np.testing.assert_array_equal(got.numpy(), rows.float().numpy())
    assert got.shape == tuple(rows.shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_tensors_share_the_memory_in_the_servers_dtype(dtype: torch.dtype) -> None:
    got = embedding(torch.randn(5, 12).to(dtype))
    tensor = got.torch()
    assert tensor.dtype == dtype
    tensor[2, 3] = 7
    assert got.numpy()[2, 3] == 7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_an_embedding_is_an_array(dtype: torch.dtype) -> None:
    rows = torch.randn(5, 12).to(dtype)
    got = embedding(rows)
    array = np.asarray(got)
    assert (array.dtype, array.shape) == (np.float32, (5, 12))
    np.testing.assert_array_equal(array, rows.float().numpy())
    assert np.asarray(got, np.float64).dtype == np.float64
    assert not np.shares_memory(np.array(got), got.torch().view(torch.uint8).numpy())
    if dtype == torch.bfloat16:
        with pytest.raises(ValueError, match="copy"):
            np.asarray(got, copy=False)
    else:
        assert np.shares_memory(np.asarray(got, rows.numpy().dtype, copy=False), got.torch().numpy())


@pytest.mark.parametrize("levels", [0, 1, 2])
def test_deepstack_levels_are_cut_along_the_width(levels: int) -> None:
    rows = torch.randn(5, 12).bfloat16()
    got = embedding(rows, levels)
    parts = [got.main, *got.deepstack]
    assert len(parts) == 1 + levels
    for part, whole in zip(parts, rows.float().chunk(1 + levels, -1), strict=True):
        np.testing.assert_array_equal(part, whole.numpy())


def test_a_report_keeps_every_field_and_survives_newer_paths() -> None:
    message = pb.ItemReport(path=pb.PATH_EAGER, fallback_reason="oversize", tokens=4, kept=[1, 3])
    message.queued.nanos, message.encoded.seconds = 500_000_000, 2
    assert Report.from_message(message) == Report("eager", "oversize", 0, 4, 0.5, 2.0, (1, 3))
    message.path = 77  # type: ignore[assignment]
    assert Report.from_message(message).path == "unspecified"


# -- options of the processor ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"max_pixels": 99, "min_pixels": None}, (None, 99)),
        ({"size": {"shortest_edge": 4, "longest_edge": 9}}, (4, 9)),
        ({"size": {"shortest_edge": 4, "longest_edge": 9}, "min_pixels": 5}, (5, 9)),  # as processors have it
        (ProcessorOptions(4, 9), (4, 9)),
    ],
)
def test_options_travel_by_their_own_names(given: Any, expected: tuple[int | None, int | None]) -> None:
    for item in (
        Item(encoded=b"file", options=given),
        Item.from_file(b"file", options=given),
        Item.from_image(np.zeros((2, 3), np.uint8), options=given),
    ):
        assert item.options == ProcessorOptions(*expected)
        sent = to_wire(item).message.options
        assert [sent.HasField(name) for name in ("min_pixels", "max_pixels")] == [each is not None for each in expected]
        assert (sent.min_pixels, sent.max_pixels) == tuple(each or 0 for each in expected)
        assert pickle.loads(pickle.dumps(item)).options == item.options
        assert "max_pixels" in repr(item)


@pytest.mark.parametrize("none", [None, {}, {"max_pixels": None}, ProcessorOptions()])
def test_no_options_are_none(none: Any) -> None:
    item = Item(encoded=b"file", options=none)
    assert item.options is None
    assert not to_wire(item).message.HasField("options")


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"max_pixels": 0}, "options.max_pixels"),
        ({"min_pixels": -1}, "options.min_pixels"),
        ({"max_pixels": 1 << 63}, "options.max_pixels"),
        ({"max_pixels": 10**9999}, "options.max_pixels"),
        ({"max_pixels": True}, "options.max_pixels"),
        ({"max_pixels": 9.0}, "options.max_pixels"),
        ({"max_pixels": "9"}, "options.max_pixels"),
        ({"min_pixels": 9, "max_pixels": 8}, "options.max_pixels"),
        ({"size": {"longest_edge": 9}}, "options.size"),
        ({"size": 448}, "options.size"),
        ({"size": {"height": 9, "width": 9}}, "options.size"),
        ({"frames": [2, 2]}, "options.frames"),
        ({"frames": []}, "options.frames"),
        ({"frames": 3}, "options.frames"),
        ({"frames": [1 << 32]}, "options.frames"),
        ({"resample": 3}, "options.resample"),
        ({7: 3}, "options.7"),
        ([("max_pixels", 9)], "options"),
        ("max_pixels", "options"),
    ],
    ids=lambda given: repr(given)[:40] if isinstance(given, str | list) else None,
)
def test_wrong_options_are_named(given: Any, field: str) -> None:
    with pytest.raises(InvalidItem) as error:
        Item(encoded=b"file", options=given)
    assert [violation.field for violation in error.value.violations] == [field]


@pytest.mark.parametrize(
    "item",
    [
        {"pixels": PIXELS, "grid": GRID},
        {"encoded": b"file", "modality": "video"},
        {"pixels": np.zeros((2, 4, 4, 3), np.uint8), "modality": "video"},
        {"content_id": "seen"},
    ],
)
def test_options_are_for_images_that_the_server_prepares(item: dict[str, Any]) -> None:
    with pytest.raises(InvalidItem, match=r"options\.max_pixels: is only for images that the server prepares"):
        Item(**item, options={"max_pixels": 9})


def test_a_name_is_looked_up_without_options() -> None:
    """It names the content with its options."""
    item = without_pixels(Item(encoded=b"file", content_id="name", options={"max_pixels": 9}))
    assert (item.content_id, item.options) == ("name", None)


def test_options_are_part_of_a_content_id() -> None:
    given = [None, ProcessorOptions(), ProcessorOptions(9), ProcessorOptions(None, 9), ProcessorOptions(9, 9)]
    found = [content_id(b"d" * 32, "image", described(tiling=False), b"k" * 32, each) for each in given]
    assert found[0] == found[1] == content_id(b"d" * 32, "image", described(tiling=False), b"k" * 32)
    assert len(set(found)) == 4
