"""`vitwire sglang-encoder` as SGLang sees it: plain HTTP in, pickled headers and rows over ZMQ out.

tests/engines/sglang drives it by SGLang's own code.
"""

import base64
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest
import torch
import zmq
from PIL import Image

from adapters import Adapter, adapting, read, receiving
from encoded_files import clip, moving
from entered import entered
from routers import serving_file
from servers import ServerProcess, serving
from vitwire import Client, Embedding, Item

Receiver = tuple[zmq.Socket[bytes], int]
_SECONDS = 60
LIMITS = ("--max-body-bytes", "100000", "--max-images", "3", "--send-seconds", "5")

vitwire = entered(lambda checkpoints: serving(checkpoints("qwen3_vl"), "--graphs", "off"))
adapter = entered(lambda vitwire: adapting(vitwire.target, *LIMITS))
receiver = entered(receiving, scope="function")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("images")
    generator = np.random.default_rng(3)
    paths = [folder / "a.png", folder / "b.png", folder / "large.png"]
    for path, shape in zip(paths, [(64, 96, 3), (96, 64, 3)], strict=False):
        Image.fromarray(generator.integers(0, 256, shape, np.uint8)).save(path)
    Image.linear_gradient("L").resize((768, 768)).save(paths[2])  # few bytes, but rows that ZMQ does not copy
    return paths


@pytest.fixture(scope="module")
def embeddings(vitwire: ServerProcess, images: list[Path]) -> list[Embedding]:
    with Client(vitwire.target) as client:
        return client.encode_images(images)


def uris(images: Sequence[Path]) -> list[str]:
    return ["data:image/png;base64," + base64.b64encode(each.read_bytes()).decode() for each in images]


def post(adapter: Adapter, path: str, body: object) -> tuple[int, Any]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with urlopen(Request(adapter.http + path, content), timeout=_SECONDS) as response:
            return response.status, json.loads(response.read())
    except HTTPError as error:
        return error.code, json.loads(error.read())


def part(sources: Sequence[object], port: int | None, **change: object) -> dict[str, object]:
    found = {"mm_items": list(sources), "req_id": "r_local_part_0", "num_parts": 1, "part_idx": 0, "modality": "IMAGE"}
    return found | {"prefill_host": "127.0.0.1", "embedding_port": port} | change


def test_the_rows_of_several_images_arrive_in_order(
    adapter: Adapter, images: list[Path], embeddings: list[Embedding], receiver: Receiver
) -> None:
    socket, port = receiver
    assert post(adapter, "/encode", part(uris(images), port, req_id="r", num_parts=3, part_idx=2)) == (200, None)
    header, rows = read(socket.recv_multipart())
    assert rows is not None
    assert torch.equal(rows, torch.cat([each.torch() for each in embeddings]))
    assert header.grid_dim == [list(each.grid) for each in embeddings]
    assert (header.req_id, header.num_parts, header.part_idx, header.error_msg) == ("r", 3, 2, None)


def test_schedulers_register_before_or_after_the_request(
    adapter: Adapter, images: list[Path], embeddings: list[Embedding], receiver: Receiver
) -> None:
    socket, port = receiver
    registration = {"req_id": "s", "receive_url": f"127.0.0.1:{port}", "receive_count": 1}
    request = part(uris(images[:1]), None, req_id="s")
    assert post(adapter, "/scheduler_receive_url", registration) == (200, None)
    assert post(adapter, "/encode", request) == (200, None)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(post, adapter, "/encode", request)
        assert post(adapter, "/scheduler_receive_url", registration) == (200, None)
        assert waiting.result() == (200, None)
    for _ in range(2):
        header, rows = read(socket.recv_multipart())
        assert header.req_id == "s"
        assert rows is not None
        assert torch.equal(rows, embeddings[0].torch())


def test_errors_reach_the_caller_and_the_receiver(adapter: Adapter, images: list[Path], receiver: Receiver) -> None:
    socket, port = receiver
    status, body = post(adapter, "/encode", part([*uris(images[:1]), base64.b64encode(b"no image").decode()], port))
    assert (status, body["status"], body["req_id"]) == (400, "error", "r_local_part_0")
    assert body["message"] == "mm_items[1]: not a JPEG, PNG, WebP, GIF, BMP, AVIF, TIFF, ICO or JPEG 2000 image"
    header, rows = read(socket.recv_multipart())
    assert (header.error_msg, header.error_code, rows) == (body["message"], 400, None)


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/encode", b"[" * 50_000, 400, "the body is not valid JSON"),
        ("/encode", b"\xff", 400, "the body is not valid JSON"),
        ("/encode", b"[]", 400, "the body is not a JSON object"),
        ("/encode", {}, 400, "modality: expected a string, got NoneType"),
        ("/encode", b"x" * 100_001, 413, "the body exceeds the limit of 100000 bytes"),
        ("/encode", part(["aGk="] * 4, 5), 400, "mm_items: 4 images or clips exceed the limit of 3"),
        (
            "/encode",
            part(["http://127.0.0.1:1/a.png"], 5),
            400,
            "mm_items[0]: no URLs are fetched without --allow-image-host: send",
        ),
        ("/encode", part(["file:///etc/passwd"], 5), 400, "mm_items[0]: is a file: URL"),
        (
            "/encode",
            part([{"url": "aGk=", "\ud800": 1}], 5, req_id="\ud800"),
            400,
            "mm_items[0]: this encoder has no per",
        ),
        ("/encode", part(["aGk="], 5, prefill_host="ipc:///tmp/x"), 400, "prefill_host and embedding_port: expected"),
        ("/encode", part(["aGk="], 5, modality="AUDIO"), 400, "modality: this encoder takes images and clips only"),
        ("/encode", part(["aGk="], 5, modality="VIDEO"), 400, "mm_items[0]: neither an MP4, WebM, AVI nor MPEG"),
        ("/scheduler_receive_url", {"req_id": "r", "receive_url": "x"}, 400, "receive_url: expected host:port"),
        ("/send", {"req_id": "r"}, 501, "this encoder sends embeddings over ZMQ only"),
        ("/scheduler_receive_meta_data", {"req_id": "r"}, 501, "this encoder sends embeddings over ZMQ only"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(
    adapter: Adapter, path: str, body: object, status: int, message: str
) -> None:
    found, answer = post(adapter, path, body)
    assert (found, answer["message"][: len(message)]) == (status, message)


def test_clips_arrive_with_the_times_of_their_frames(
    adapter: Adapter, vitwire: ServerProcess, receiver: Receiver
) -> None:
    socket, port = receiver
    files = [clip(moving(30), 10.0), clip(moving(9, 64, 96), 6.0, "webm", "libvpx-vp9")]
    sources = ["data:video/mp4;base64," + base64.b64encode(each).decode() for each in files]
    assert post(adapter, "/encode", part(sources, port, modality="VIDEO")) == (200, None)
    header, rows = read(socket.recv_multipart())
    with Client(vitwire.target) as client:
        model = client.model()
        expected = client.encode([Item(encoded=each, modality="video") for each in files])
    assert header.modality == 2
    assert header.grid_dim == [list(each.grid) for each in expected]
    assert header.video_timestamps == [model.group_seconds(each.report.frame_seconds) for each in expected]
    assert rows is not None
    torch.testing.assert_close(rows, torch.cat([each.torch() for each in expected]), rtol=0, atol=0.02)


def test_errors_name_the_request_as_it_was_sent(adapter: Adapter) -> None:
    status, body = post(adapter, "/encode", part(["aGk="], 5, req_id="\ud800"))
    assert (status, body["req_id"]) == (400, "\ud800")


def test_receivers_that_cannot_be_reached_fail_the_request_only(
    adapter: Adapter, images: list[Path], receiver: Receiver
) -> None:
    socket, port = receiver
    assert post(adapter, "/encode", part(uris(images[:1]), port, prefill_host="localhost")) == (200, None)
    assert read(socket.recv_multipart())[1] is not None
    status, _ = post(adapter, "/encode", part(uris(images[:1]), port, prefill_host="absent.invalid"))
    assert status in (502, 504)
    request = part(uris(images[:1]), None, embedding_port=[1] * 64)
    with ThreadPoolExecutor(2) as pool:
        assert {status for status, _ in pool.map(lambda _: post(adapter, "/encode", request), range(2))} <= {503, 504}
    assert post(adapter, "/encode", part(uris(images[:1]), port)) == (200, None)
    assert read(socket.recv_multipart())[1] is not None
    assert "Traceback" not in adapter.server.log()


def test_a_receiver_that_is_gone_fails_the_request_only(
    adapter: Adapter, images: list[Path], receiver: Receiver
) -> None:
    socket, port = receiver
    status, body = post(adapter, "/encode", part(uris(images[:1]), 1))
    assert status == 504
    assert body["message"].startswith("receiver tcp://127.0.0.1:1 did not take the embedding within 5 s")
    assert post(adapter, "/encode", part(uris(images[:1]), port)) == (200, None)
    assert read(socket.recv_multipart())[1] is not None


def test_it_is_healthy_while_the_server_is(vitwire: ServerProcess, adapter: Adapter) -> None:
    def health(adapter: Adapter) -> int:
        try:
            with urlopen(f"{adapter.http}/health", timeout=_SECONDS) as response:
                return int(response.status)
        except HTTPError as error:
            return error.code

    assert health(adapter) == 200
    with adapting("127.0.0.1:1") as alone:
        assert health(alone) == 503
        assert alone.server.stop() == 0


@pytest.mark.matrix
def test_urls_and_receivers_follow_their_rules(
    vitwire: ServerProcess, images: list[Path], embeddings: list[Embedding], receiver: Receiver
) -> None:
    socket, port = receiver

    with serving_file(images[0].read_bytes()) as site:
        host = f"127.0.0.1:{site}"
        rules = ("--allow-image-host", host, "--allow-image-network=127.0.0.0/8", "--receiver-network=127.0.0.0/30")
        with adapting(vitwire.target, *rules) as adapter:
            assert post(adapter, "/encode", part([f"http://{host}/a.png"], port)) == (200, None)
            status, body = post(adapter, "/encode", part(["http://127.0.0.1:1/a.png"], port))
            assert (status, body["message"][:12]) == (400, "mm_items[0]:")
            for place in ("127.0.0.9", "localhost"):
                status, body = post(adapter, "/encode", part(uris(images[:1]), port, prefill_host=place))
                assert (status, body["message"][:9]) == (400, "receiver ")
    header, rows = read(socket.recv_multipart())
    assert header.error_msg is None
    assert rows is not None
    assert torch.equal(rows, embeddings[0].torch())
