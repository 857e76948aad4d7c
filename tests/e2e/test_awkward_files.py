"""Files that people have, the same on every way to the encoder: transparent, turned, and of uneven rates."""

import base64
import io
import json
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import pytest
import torch
from PIL import Image

from adapters import Adapter, adapting, read, receiving
from checkpoints import Checkpoints
from clear_files import black_text, faded
from encoded_files import clip, frames_of, moving, saved, turned
from entered import entered
from prepared import of_clips
from routers import EngineProcess, client_of, decoded, router
from servers import ServerProcess, serving
from vitwire import Accepted, Client, Embedding, Item
from vitwire_server.preparing.rules.sampling import sampled

SIDEWAYS = (0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30)
"""A phone held upright: frames are shown a quarter turn to the right."""
FLAGS = ("--cache-bytes", "100000000", "--dtype", "float32")
MIRRORED = (-(1 << 16), 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
WAYS = {
    "cpu": ("--prepare", "cpu"),
    "device": ("--prepare", "device"),
    "edges on the device": ("--prepare", "device", "--rpc-processes", "2", "--decode-processes", "2"),
}
IMAGES = {
    "black text": saved(black_text(), "PNG"),
    "palette": saved(faded().quantize(64), "PNG", transparency=bytes(range(0, 256, 4))),
    "webp": saved(faded(), "WEBP", lossless=True),
    "sideways jpeg": turned("JPEG"),
    "sideways png": turned("PNG", 5),
}
CLIPS = {
    "sideways": clip(moving(30), 10.0, matrix=SIDEWAYS),
    "mirrored": clip(moving(30), 10.0, matrix=MIRRORED),
}

server = entered(
    lambda checkpoints, request: serving(checkpoints("qwen2_5_vl"), *FLAGS, *WAYS[request.param]),
    params=["cpu", pytest.param("device", marks=pytest.mark.matrix), "edges on the device"],
)
client = entered(lambda server: Client(server.target))


def data_uri(file: bytes, kind: str) -> str:
    return f"data:{kind};base64," + base64.b64encode(file).decode()


def push(adapter: Adapter, uri: str, modality: str, port: int) -> None:
    """Have a receiver of SGLang get a file."""
    body = {"mm_items": [uri], "req_id": "r_local_part_0", "num_parts": 1, "part_idx": 0, "modality": modality}
    content = json.dumps(body | {"prefill_host": "127.0.0.1", "embedding_port": port}).encode()
    with urlopen(Request(f"{adapter.http}/encode", content), timeout=60) as response:
        assert response.status == 200


def assert_same(one: Embedding, other: Embedding) -> None:
    """The rows of equal pixels. Packed with other neighbours, the products of float32 may round differently."""
    assert one.grid == other.grid
    np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=0, atol=1e-5)


def on_white(file: bytes) -> np.ndarray:
    """The picture, upright, as plain pixels: EXIF 6 and 5 are a quarter turn to the right, and a transposition."""
    image = Image.open(io.BytesIO(file))
    clear = image.convert("RGBA")
    white = Image.new("RGB", clear.size, "white")
    white.paste(clear, mask=clear)
    pixels = np.asarray(white)
    orientation = image.getexif().get(0x0112, 1)
    return {1: pixels, 6: np.rot90(pixels, -1), 5: pixels.swapaxes(0, 1)}[orientation]


def upright(name: str, checkpoints: Checkpoints) -> np.ndarray:
    """The frames that are used of a clip, as they are shown."""
    recipe = of_clips(checkpoints("qwen2_5_vl"))
    assert recipe.settings.sampling
    frames = frames_of(CLIPS[name], sampled(30, 10.0, recipe.settings.sampling, recipe.temporal))
    return np.stack([np.rot90(each, -1) if name == "sideways" else each[:, ::-1] for each in frames])


def test_files_and_pictures_get_the_rows_of_plain_pixels(client: Client, checkpoints: Checkpoints) -> None:
    for file in IMAGES.values():
        (expected,) = client.encode_images([on_white(file)])
        image = Image.open(io.BytesIO(file))
        items = [Item(encoded=file), Item.from_image(image)]
        streamed = dict(client.iter_encode(items))
        for own in (*client.encode(items), *client.encode_images([file, image]), streamed[0], streamed[1]):
            assert_same(own, expected)
    photo = Image.open(io.BytesIO(turned("JPEG")))
    frames = np.stack([np.rot90(np.asarray(photo), -1)] * 4)
    assert_same(*client.encode_clips([[photo] * 4]), *client.encode_clips([frames]))
    for name, file in CLIPS.items():
        (expected,) = client.encode_clips([upright(name, checkpoints)])
        item = Item(encoded=file, modality="video")
        assert_same(client.encode([item])[0], expected)
        assert_same(dict(client.iter_encode([item]))[0], expected)


def test_the_router_sends_the_same_rows(
    server: ServerProcess, stand_in: EngineProcess, checkpoints: Checkpoints
) -> None:
    parts = [{"type": "image_url", "image_url": {"url": data_uri(IMAGES["black text"], "image/png")}}]
    parts += [{"type": "video_url", "video_url": {"url": data_uri(CLIPS["sideways"], "video/mp4")}}]
    with Client(server.target) as client:
        (text,) = client.encode_images([on_white(IMAGES["black text"])])
        (frames,) = client.encode_clips([upright("sideways", checkpoints)])
    for flags in ((), ("--mode=reference",)):
        with router(server.target, stand_in.url, *flags) as proxy, client_of(proxy) as llm:
            model = f"rows-from-{server.target}" if flags else "tiny"
            messages: list[Any] = [{"role": "user", "content": parts}]
            llm.chat.completions.create(model=model, messages=messages)
        image, video, *_ = stand_in.requests()[-1]["body"]["messages"][0]["content"]
        if flags:
            assert image["image_embeds"] == {"image_grid_thw": list(text.grid)}
            grid, seconds = video["video_embeds"]["video_grid_thw"], video["video_embeds"]["second_per_grid_ts"]
            with Client(server.target) as client:
                rows = [client.encode([Item(content_id=image["uuid"])])[0].torch()]
                rows.append(client.encode([Item(content_id=video["uuid"], modality="video")])[0].torch())
        else:
            assert decoded(image["image_embeds"]["image_grid_thw"]).tolist() == list(text.grid)
            names = ("video_grid_thw", "second_per_grid_ts")
            grid, seconds = (decoded(video["video_embeds"][name]).tolist() for name in names)
            rows = [decoded(image["image_embeds"]["image_embeds"]), decoded(video["video_embeds"]["video_embeds"])]
        for own, expected in zip(rows, (text, frames), strict=True):
            torch.testing.assert_close(own, expected.torch(), rtol=0, atol=1e-5)
        assert grid == list(frames.grid)
        assert seconds == [1.0], "6 of 30 frames at 10 per second, two a group"


def test_the_encoder_of_sglang_sends_the_same_rows(
    server: ServerProcess, checkpoints: Checkpoints, client: Client
) -> None:
    uris = {
        "IMAGE": data_uri(IMAGES["black text"], "image/png"),
        "VIDEO": data_uri(CLIPS["sideways"], "video/mp4"),
    }
    expected = client.encode_images([on_white(IMAGES["black text"])])
    expected += client.encode_clips([upright("sideways", checkpoints)])
    with adapting(server.target) as adapter, receiving() as (socket, port):
        for (modality, uri), embedding in zip(uris.items(), expected, strict=True):
            push(adapter, uri, modality, port)
            header, rows = read(socket.recv_multipart())
            assert rows is not None
            assert header.grid_dim == [list(embedding.grid)]
            torch.testing.assert_close(rows, embedding.torch(), rtol=0, atol=1e-5)
        assert header.second_per_grid_ts == [1.0]


def test_a_film_says_the_seconds_of_its_groups(client: Client) -> None:
    frames = [np.full((28, 56, 3), index % 256, np.uint8) for index in range(1199)]
    item = Item(encoded=clip(frames, 24000 / 1001, codec="mpeg4"), modality="video", content_id="film")
    accepted, stored = (answer for _, answer in client.iter_store([item]))
    assert isinstance(accepted, Accepted)
    (embedding,) = client.encode([item])
    for found in (accepted, stored.report, embedding.report):
        assert found.second_per_grid == pytest.approx(1.0002, abs=5e-5)
        assert len(found.frame_seconds) == 100
