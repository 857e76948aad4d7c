"""float32 pixels that the client rounds give the rows that they give unrounded, from real servers."""

import asyncio

import grpc
import numpy as np
import pytest
import torch

from checkpoints import Checkpoints
from servers import PIXELS_ONLY, serving
from vitwire import AsyncClient, Client, InvalidItem, Item
from vitwire._transport.uploads import to_wire
from vitwire.v1 import encoder_pb2 as pb
from vitwire.v1 import encoder_pb2_grpc as rpc

FORMS = {
    "qwen3_vl": lambda model: (
        (16 * 24, model.channels * model.temporal_patch_size * model.patch_size**2),
        (1, 16, 24),
    ),
    "internvl": lambda model: ((2, 3, *model.tiles.tile), (2, 1, 1)),
}


def rows_of(target: str, item: Item) -> bytes:
    """The rows of an item whose pixels are sent as they are."""
    sent = to_wire(item)
    sent.message.pixels.data = bytes(sent.tensors.pixels)
    with grpc.insecure_channel(target) as channel:
        answers = list(rpc.EncoderServiceStub(channel).Encode(pb.EncodeRequest(items=[sent.message])))
    return b"".join(answer.chunk.data for answer in answers)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("model_type", FORMS)
def test_rows_are_the_same(model_type: str, dtype: str, checkpoints: Checkpoints) -> None:
    with serving(checkpoints(model_type), "--dtype", dtype, *PIXELS_ONLY) as server, Client(server.target) as client:
        shape, grid = FORMS[model_type](client.model())
        pixels = np.random.default_rng(0).standard_normal(shape, np.float32)
        item = Item(pixels, grid)
        expected = rows_of(server.target, item)
        before = server.metric("vitwire_received_bytes_total")
        (own,) = client.encode([item])
        assert server.metric("vitwire_received_bytes_total") - before < 0.51 * pixels.nbytes
        (tensor,) = client.encode([Item(torch.from_numpy(pixels), grid)])

        async def later() -> bytes:
            async with AsyncClient(server.target) as same:
                return (await same.encode([item]))[0]._host().tobytes()

        assert expected == own._host().tobytes() == tensor._host().tobytes() == asyncio.run(later())
        pixels[0] = 3e38 if dtype == "float16" else np.nan
        reason = "beyond the range of float16" if dtype == "float16" else "holds NaN or infinity"
        with pytest.raises(InvalidItem, match=reason):
            client.encode([Item(pixels, grid)])


def test_equal_frames_are_sent_once(checkpoints: Checkpoints) -> None:
    """As a processor repeats an image where a patch has two frames."""
    with (
        serving(checkpoints("qwen3_vl"), "--dtype", "bfloat16", *PIXELS_ONLY) as server,
        Client(server.target) as client,
    ):
        shape, grid = FORMS["qwen3_vl"](client.model())
        model = client.model()
        once = np.random.default_rng(0).standard_normal((shape[0], model.channels, 1, model.patch_size**2), np.float32)
        pixels = np.repeat(once, 2, axis=2).reshape(shape)
        expected = rows_of(server.target, Item(pixels, grid))
        for source in (pixels, torch.from_numpy(pixels), pixels.astype(np.float16)):
            before = server.metric("vitwire_received_bytes_total")
            (own,) = client.encode([Item(source, grid)])
            assert server.metric("vitwire_received_bytes_total") - before < 0.26 * pixels.nbytes
            assert (own._host().tobytes() == expected) is (source.dtype != np.float16)
        clip = Item(pixels, (1, *grid[1:]), "video")
        before = server.metric("vitwire_received_bytes_total")
        client.encode([clip])
        assert server.metric("vitwire_received_bytes_total") - before > 0.49 * pixels.nbytes
