"""Pictures and files that the engine prepares, against those that decoders prepare, through real servers."""

import time
from itertools import product
from pathlib import Path

import grpc
import numpy as np
import pytest

from checkpoints import Checkpoints
from encoded_files import clip, moving, photograph, saved, turned
from servers import ServerProcess, serving
from vitwire.v1 import encoder_pb2 as pb
from vitwire.v1 import encoder_pb2_grpc as rpc

FLAGS = ("--dtype", "float32", "--decode-processes", "1")
LARGE = ((700, 800), (1600, 401))
"""Of photographs that a decoder on the device takes."""
MODEL_TYPES = ("qwen3_vl", "deepseek_ocr2", "llava_onevision")
"""Of patches, of tiles with crops, and of tiles with an overview."""
Rows = list[tuple[tuple[int, int, int], np.ndarray]]
"""Grid and rows of each item."""
SHAPES = {"one process": (), "edges": ("--rpc-processes", "2", "--decode-processes", "2")}
EVERYDAY = (("qwen3_vl", "edges"), ("llava_onevision", "one process"))


def picture(array: np.ndarray, modality: "pb.Modality.ValueType" = pb.MODALITY_IMAGE) -> pb.Item:
    """A picture as a message: pixels without a grid."""
    tensor = pb.Tensor(data_type=pb.DATA_TYPE_UINT8, shape=array.shape, data=array.tobytes())
    return pb.Item(modality=modality, pixels=tensor)


def items(*, clips: bool) -> list[pb.Item]:
    """Pictures and files of several sizes and kinds."""
    photo = photograph(230, 310)
    rgba = np.dstack([np.asarray(photo), np.arange(230 * 310, dtype=np.uint32).reshape(230, 310).astype(np.uint8)])
    files = [saved(photo, quality=85), saved(photo, "PNG"), turned("JPEG"), saved(photo, "GIF"), saved(photo, "BMP")]
    made = [picture(np.asarray(photograph(*size))) for size in ((230, 310), (61, 400), (300, 64))] + [picture(rgba)]
    made += [pb.Item(modality=pb.MODALITY_IMAGE, encoded=file) for file in files]
    if clips:
        made.append(pb.Item(modality=pb.MODALITY_VIDEO, encoded=clip(moving(12), 4.0)))
        frames = np.stack([np.asarray(photograph(90, 120))] * 3 + [np.asarray(photograph(90, 120))[:, ::-1]])
        made.append(picture(frames, pb.MODALITY_VIDEO))
    return made


def rows_of(server: ServerProcess, sent: list[pb.Item]) -> Rows:
    """The grid and rows of each item, from one request."""
    parts: dict[int, list[bytes]] = {}
    found: dict[int, tuple[tuple[int, int, int], np.ndarray]] = {}
    with grpc.insecure_channel(server.target) as channel:
        for answer in rpc.EncoderServiceStub(channel).Encode(pb.EncodeRequest(items=sent)):
            assert answer.WhichOneof("result") == "chunk", answer
            parts.setdefault(answer.item, []).append(answer.chunk.data)
            if answer.chunk.last:
                grid = answer.report.grid
                rows = np.frombuffer(b"".join(parts[answer.item]), np.float32).reshape(tuple(answer.chunk.shape))
                found[answer.item] = ((grid.t, grid.h, grid.w), rows)
    return [found[index] for index in range(len(sent))]


@pytest.fixture(scope="module")
def prepared_by_decoders(request: pytest.FixtureRequest, checkpoints: Checkpoints) -> tuple[Path, list[pb.Item], Rows]:
    """A checkpoint, items, and their grids and rows by a server whose decoders prepare them."""
    folder = checkpoints(request.param)
    with serving(folder, *FLAGS, "--prepare", "cpu") as server, grpc.insecure_channel(server.target) as channel:
        model = rpc.EncoderServiceStub(channel).GetModel(pb.GetModelRequest())
        sent = items(clips=pb.ENCODING_MP4 in model.encodings)
        expected = rows_of(server, sent)
        assert (model.preparation.place, model.preparation.reason) == ("cpu", "asked")
        assert server.metric("vitwire_prepared_total", where="cpu", reason="asked") == len(sent)
        assert server.metric("vitwire_prepare_seconds_count", stage="prepare") == len(sent)
        assert server.metric("vitwire_prepare_seconds_count", stage="batch") == 0
        assert server.metric("vitwire_preparation_info", what="prepare", where="cpu", reason="asked") == 1
    return folder, sent, expected


@pytest.mark.parametrize(
    ("prepared_by_decoders", "shape"),
    [
        pytest.param(*both, marks=[] if both in EVERYDAY else [pytest.mark.matrix])
        for both in product(MODEL_TYPES, SHAPES)
    ],
    indirect=["prepared_by_decoders"],
)
def test_the_engine_prepares_as_decoders_do(prepared_by_decoders: tuple[Path, list[pb.Item], Rows], shape: str) -> None:
    folder, sent, expected = prepared_by_decoders
    with (
        serving(folder, *FLAGS, *SHAPES[shape], "--prepare", "device") as server,
        grpc.insecure_channel(server.target) as channel,
    ):
        model = rpc.EncoderServiceStub(channel).GetModel(pb.GetModelRequest())
        assert (model.preparation.place, model.preparation.reason) == ("device", "")
        for own, other in zip(rows_of(server, sent), expected, strict=True):
            assert own[0] == other[0]
            np.testing.assert_allclose(own[1], other[1], rtol=0, atol=1e-5)
        for own, other in zip(rows_of(server, sent[::-1]), expected[::-1], strict=True):
            np.testing.assert_allclose(own[1], other[1], rtol=0, atol=1e-5)
        assert server.metric("vitwire_prepared_total", where="device", reason="") == 2 * len(sent)
        batches = server.metric("vitwire_prepare_seconds_count", where="device", stage="batch")
        assert 1 <= batches <= server.metric("vitwire_batch_items_count")
        spent = server.metric("vitwire_prepare_seconds_sum", stage="batch")
        assert 0 < spent < server.metric("vitwire_stage_seconds_sum", stage="execute")
        assert server.metric("vitwire_prepare_seconds_count", stage="prepare") == 0
        assert server.metric("vitwire_admitted_bytes") == 0


def test_a_graph_is_filled_by_the_engine(checkpoints: Checkpoints) -> None:
    """The same with simulated graphs, whose buffers are used again and again."""
    flags = (*FLAGS, "--graphs", "simulated", "--max-budget-tokens", "256")
    folder = checkpoints("qwen3_vl")
    sent = items(clips=False)
    with serving(folder, *flags, "--prepare", "cpu") as server:
        expected = rows_of(server, sent)
    with serving(folder, *flags, "--prepare", "device") as server:
        for _ in range(2):
            for own, other in zip(rows_of(server, sent), expected, strict=True):
                np.testing.assert_allclose(own[1], other[1], rtol=0, atol=1e-5)
        assert server.metric("vitwire_items_total", path="graph") > 0


def test_a_large_picture_goes_through_a_decoder(checkpoints: Checkpoints) -> None:
    """6000 x 6000 pixels are 108 MB, more than may wait for the engine; 4 MB of them are left after resizing."""
    photo = saved(photograph(6000, 6000).resize((6000, 6000)), quality=60)
    with serving(checkpoints("qwen3_vl"), *FLAGS, "--prepare", "device") as server:
        ((grid, _),) = rows_of(server, [pb.Item(modality=pb.MODALITY_IMAGE, encoded=photo)])
        assert grid[1] * grid[2] > 0
        assert server.metric("vitwire_prepared_total", where="cpu", reason="too_large") == 1
        assert server.metric("vitwire_prepared_total", where="device") == 0


@pytest.fixture(scope="module")
def decoded_on_the_cpu(checkpoints: Checkpoints) -> tuple[list[pb.Item], Rows]:
    """Items, some of them large, and their grids and rows by a server that decodes on the CPU."""
    sent = items(clips=True)
    sent += [pb.Item(modality=pb.MODALITY_IMAGE, encoded=saved(photograph(*size))) for size in LARGE]
    with serving(checkpoints("qwen3_vl"), *FLAGS, "--decode", "cpu") as server:
        return sent, rows_of(server, sent)


@pytest.mark.parametrize(
    "shape", [each if "edges" in each else pytest.param(each, marks=pytest.mark.matrix) for each in SHAPES]
)
def test_jpegs_are_decoded_beside_the_engine(
    shape: str, decoded_on_the_cpu: tuple[list[pb.Item], Rows], checkpoints: Checkpoints
) -> None:
    """By nvImageCodec, here on the CPU; other files by the usual decoders. The rows are the same."""
    sent, expected = decoded_on_the_cpu
    jpegs = [pb.Item(modality=pb.MODALITY_IMAGE, encoded=saved(photograph(*LARGE[0]))) for _ in range(4)]
    with serving(checkpoints("qwen3_vl"), *FLAGS, *SHAPES[shape], "--decode", "device") as server:
        with grpc.insecure_channel(server.target) as channel:
            found = rpc.EncoderServiceStub(channel).GetModel(pb.GetModelRequest()).decoding
        assert (found.place, found.reason) == ("device", "")
        deadline = time.monotonic() + 60
        while not server.metric("vitwire_prepare_seconds_count", where="device", stage="decode"):
            assert time.monotonic() < deadline, "its process takes seconds to start"
            rows_of(server, jpegs)
        for (grid, own), (its, rows) in zip(rows_of(server, sent), expected, strict=True):
            assert grid == its
            np.testing.assert_allclose(own, rows, rtol=0, atol=1e-5)
        assert server.metric("vitwire_prepare_seconds_count", where="cpu", stage="decode") > 0
