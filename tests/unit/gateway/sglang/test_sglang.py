"""The pure parts of the SGLang integration: requests, headers, registrations, images."""

import asyncio
import base64
import io
import os
import pickle
from dataclasses import replace
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from fake_service import Fake, model_message, serving
from vitwire import AsyncClient, Model, Report
from vitwire_gateway.api_errors import ApiError
from vitwire_gateway.callers import Caller
from vitwire_gateway.gateway_settings import SglangSettings
from vitwire_gateway.images.encoding import Encoder
from vitwire_gateway.images.fetching import Fetcher
from vitwire_gateway.images.image_files import ImageFile
from vitwire_gateway.sglang.adapter import Adapter
from vitwire_gateway.sglang.media import Media
from vitwire_gateway.sglang.receiver_messages import Pusher, embedding_header, error_header, times_of
from vitwire_gateway.sglang.receiver_requests import (
    Part,
    Registration,
    endpoint,
    part_of_json,
    registration_of_json,
)
from vitwire_gateway.sglang.receivers import Receivers
from vitwire_gateway.workers import Workers

PART = Part("r_local_part_1", 3, 1, ("aGk=",), ())
SETTINGS = SglangSettings(send_seconds=1.0)
JSON = {"req_id": "r", "modality": "IMAGE", "mm_items": ["aGk="], "num_parts": 2, "part_idx": 1}


# -- requests --------------------------------------------------------------------------------------


def test_a_part_of_json() -> None:
    body = JSON | {"prefill_host": "10.0.0.1", "embedding_port": 5000, "time_stats_json": "{}"}
    assert part_of_json(body) == Part("r", 2, 1, ("aGk=",), ("tcp://10.0.0.1:5000",))


def test_receivers_may_be_registered_later_several_or_ipv6() -> None:
    assert part_of_json(JSON | {"prefill_host": "h", "embedding_port": None}).receivers == ()
    assert part_of_json(JSON | {"prefill_host": "::1", "embedding_port": [1, 2]}).receivers == (
        "tcp://[::1]:1",
        "tcp://[::1]:2",
    )
    body = {"req_id": "r", "receive_count": 2, "receive_url": "[fd00::1]:7000", "modality": "IMAGE"}
    assert registration_of_json(body) == Registration("r", "tcp://[fd00::1]:7000", 2)


def test_options_that_do_not_change_pixels_are_ignored_and_others_refused() -> None:
    item = {"url": "aGk=", "content_hash": "ab", "detail": "high"}
    assert part_of_json(JSON | {"mm_items": [item]}).sources == ("aGk=",)
    with pytest.raises(ApiError, match=r"mm_items\[1\]: this encoder has no per-image options, got max_dynamic_patch"):
        part_of_json(JSON | {"mm_items": [item, item | {"max_dynamic_patch": 4}]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"modality": "AUDIO"}, "modality: this encoder takes images and clips only, got 'AUDIO'"),
        ({"modality": 1}, "modality: expected a string, got int"),
        ({"req_id": ""}, "req_id: expected 1 to 512 characters, got 0"),
        ({"req_id": None}, "req_id: expected a string, got NoneType"),
        ({"num_parts": 0}, "num_parts: expected 1 to 1024, got 0"),
        ({"num_parts": True}, "num_parts: expected an integer, got bool"),
        ({"num_parts": 10**30}, "num_parts: expected 1 to 1024"),
        ({"part_idx": 2}, "part_idx: expected 0 to 1, got 2"),
        ({"part_idx": -1}, "part_idx: expected 0 to 1, got -1"),
        ({"mm_items": []}, "mm_items: expected at least one image or clip, got none"),
        ({"mm_items": None}, r"mm_items\[0\]: expected a URL or base64, got NoneType"),
        ({"mm_items": [["aGk="]]}, r"mm_items\[0\]: expected a URL or base64, got list"),
        ({"mm_items": [{"url": 5}]}, r"mm_items\[0\]: expected a URL or base64, got int"),
        ({"prefill_host": "h", "embedding_port": "5"}, "embedding_port: expected a port or a list of ports"),
        ({"prefill_host": "h", "embedding_port": [1] * 65}, "embedding_port: 65 values exceed the limit of 64"),
        ({"mm_items": ["aGk="] * 4097}, "mm_items: 4097 values exceed the limit of 4096"),
        ({"prefill_host": "h", "embedding_port": 0}, "prefill_host and embedding_port: expected host:port, got 'h:0'"),
        ({"prefill_host": 5, "embedding_port": 1}, "prefill_host: expected a string, got int"),
    ],
)
def test_invalid_requests_are_refused_by_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        part_of_json(JSON | change)
    assert caught.value.status == HTTPStatus.BAD_REQUEST


@pytest.mark.parametrize(
    "address",
    ["", "host", "host:", "host:0", "host:65536", "host:99999", "ipc:///tmp/x:1", "tcp://h:1", "a b:1", "h:1;x:2",
     "h:1\n", "::1:5", "[::1]", "*:5", "-h:1", "h\x00:1", "h:\u0661", "a" * 300 + ":1"],
)  # fmt: skip
def test_only_host_and_port_name_a_receiver(address: str) -> None:
    with pytest.raises(ApiError, match="receive_url: expected host:port"):
        endpoint(address, "receive_url")


@pytest.mark.parametrize("count", [0, -1, 65])
def test_the_number_of_receivers_is_bounded(count: int) -> None:
    with pytest.raises(ApiError, match="receive_count"):
        Registration("r", "tcp://h:1", count)


# -- headers ---------------------------------------------------------------------------------------


class _Unpickler(pickle.Unpickler):
    """As SGLang's: only named classes, here stand-ins."""

    def find_class(self, module: str, name: str) -> Any:
        known = {
            ("sglang.srt.disaggregation.encoder.receiver", "EmbeddingData"): SimpleNamespace,
            ("sglang.srt.multimodal.modality", "Modality"): lambda value: {1: "IMAGE", 2: "VIDEO"}[value],
            ("torch", "bfloat16"): torch.bfloat16,
        }
        return known[module, name]


def test_a_header_unpickles_to_the_attributes_that_sglang_reads() -> None:
    header = embedding_header(PART, [(1, 4, 6), (1, 2, 2)], (7, 192), "bfloat16")
    assert vars(_Unpickler(io.BytesIO(header)).load()) == {
        "req_id": "r_local_part_1", "num_parts": 3, "part_idx": 1, "modality": "IMAGE", "dtype": torch.bfloat16,
        "grid_dim": [[1, 4, 6], [1, 2, 2]], "shape": [7, 192], "embedding": None, "send_time": None, "_mr_ptr": None,
        "error_msg": None, "error_code": None,
    }  # fmt: skip


def test_a_header_of_clips_has_the_times_of_their_frames() -> None:
    part = part_of_json(JSON | {"modality": "VIDEO"})
    clips = [Report(frame_seconds=(0.0, 0.6, 1.2, 1.7, 2.3), second_per_grid=1.16), Report(frame_seconds=(0.0,))]
    for kind, times in (
        ("qwen3_vl", {"video_timestamps": [[0.3, 1.45, 2.3], [0.0]]}),
        ("qwen2_5_vl", {"second_per_grid_ts": [1.16, 1.0]}),
    ):
        model = replace(Model.from_message(model_message()), model_type=kind)
        grids = [(3, 4, 6), (1, 2, 2)]
        header = embedding_header(part, grids, (19, 192), "bfloat16", times_of(model, clips))
        found = vars(_Unpickler(io.BytesIO(header)).load())
        assert found["modality"] == "VIDEO"
        assert {name: found[name] for name in found if name in ("video_timestamps", "second_per_grid_ts")} == times
    assert _Unpickler(io.BytesIO(error_header(part, "m", HTTPStatus.BAD_REQUEST))).load().modality == "VIDEO"


def test_an_error_header_has_message_and_status() -> None:
    found = _Unpickler(io.BytesIO(error_header(PART, "mm_items[0]: böse", HTTPStatus.BAD_REQUEST))).load()
    assert (found.error_msg, found.error_code, type(found.error_code)) == ("mm_items[0]: böse", 400, int)
    assert (found.dtype, found.shape, found.grid_dim, found.modality) == (None, None, None, "IMAGE")


# -- registrations ---------------------------------------------------------------------------------


async def test_a_part_takes_one_registration_of_each_scheduler_in_any_order() -> None:
    receivers = Receivers(60)
    waiting = asyncio.create_task(receivers.take("r", "c"))
    for name in "aba":
        await asyncio.sleep(0)
        receivers.add(Registration("r", f"tcp://{name}:1", 2), "c")
    assert await waiting == ["tcp://a:1", "tcp://b:1"]
    assert receivers.take_registered("r") == []
    receivers.add(Registration("r", "tcp://b:1", 2), "c")
    assert await receivers.take("r", "c") == ["tcp://a:1", "tcp://b:1"]
    assert not receivers._requests
    assert not receivers._held


async def test_schedulers_that_do_not_register_are_named_after_the_time_limit() -> None:
    receivers = Receivers(0.05)
    receivers.add(Registration("r", "tcp://a:1", 2), "c")
    with pytest.raises(ApiError, match=r"1 of 2 schedulers registered for the embedding within 0.05 s") as caught:
        await receivers.take("r", "c")
    assert caught.value.status == HTTPStatus.GATEWAY_TIMEOUT
    with pytest.raises(ApiError, match="2 schedulers were announced before, got 3"):
        receivers.add(Registration("r", "tcp://a:1", 3), "c")


async def test_registrations_that_nobody_takes_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitwire_gateway.sglang.receivers._MAX_REQUESTS", 2)
    receivers = Receivers(0.02)
    receivers.add(Registration("a", "tcp://a:1", 1), "c")
    receivers.add(Registration("b", "tcp://a:1", 1), "c")
    await asyncio.sleep(0.03)
    receivers.add(Registration("c", "tcp://a:1", 1), "c")
    assert list(receivers._requests) == ["c"]
    assert receivers._held == 1


async def test_registrations_of_one_caller_leave_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitwire_gateway.sglang.receivers._MAX_REQUESTS", 3)
    receivers = Receivers(60)
    receivers.add(Registration("honest", "tcp://a:1", 1), "honest")
    for number in range(5):
        receivers.add(Registration(f"r{number}", "tcp://b:1", 1), "attacker")
    assert list(receivers._requests) == ["honest", "r3", "r4"]
    assert await receivers.take("honest", "honest") == ["tcp://a:1"]
    waiting = [asyncio.create_task(receivers.take(name, "attacker")) for name in ("r5", "r6", "r7")]
    await asyncio.sleep(0)
    with pytest.raises(ApiError, match="too many requests wait"):
        receivers.add(Registration("honest", "tcp://a:1", 1), "honest")
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    receivers.add(Registration("honest", "tcp://a:1", 1), "honest")
    assert len(receivers._requests) == receivers._held == 1


def media(**limits: Any) -> Media:
    settings = SglangSettings(**limits)
    return Media(settings.max_image_bytes, Fetcher(settings))


# -- the adapter -----------------------------------------------------------------------------------


async def test_embeddings_that_wait_for_receivers_are_bounded() -> None:
    """And the memory is free again once they do not wait."""
    file = io.BytesIO()
    Image.new("RGB", (32, 32)).save(file, "PNG")
    source = base64.b64encode(file.getvalue()).decode()
    with serving(Fake()) as running:
        async with AsyncClient(running.target) as client:
            workers = Workers("vitwire_gateway.sglang.services", 512 << 20)
            encoder = Encoder(client, workers, 10_000, max_encoding=2)
            size = (await encoder.encode(ImageFile.of(file.getvalue()))).embedding._host().nbytes
            pusher = Pusher(1.0)
            adapter = Adapter(SETTINGS, encoder, media(), pusher, embedding_bytes=3 * size)
            for _ in range(2):
                parts = [Part(f"r{number}", 1, 0, (source,) * 2, ()) for number in range(2)]
                errors = await asyncio.gather(
                    *(adapter.encode(each, Caller.of("a")) for each in parts), return_exceptions=True
                )
                statuses = {each.status for each in errors if isinstance(each, ApiError)}
                assert statuses == {HTTPStatus.GATEWAY_TIMEOUT, HTTPStatus.SERVICE_UNAVAILABLE}
            await adapter.close()
            pusher.close()
            await workers.close()


# -- images ----------------------------------------------------------------------------------------


def test_no_file_is_read() -> None:
    for source in ("file:///dev/zero", "file:///absent"):
        with pytest.raises(ApiError, match="is a file: URL"):
            media().read(source)


@pytest.mark.parametrize(
    "source", ["", "hello!", "data:image/png,xyz", "data:image/png;base64,####", "etc/passwd.png", "/etc/passwd.png"]
)
def test_what_is_no_image_source_is_refused(source: str) -> None:
    if source:
        with pytest.raises(ApiError, match="expected"):
            media().read(source)
    else:
        assert media().read(source) == b""  # refused as an image


def test_base64_is_bounded_before_it_is_decoded() -> None:
    found = media(max_image_bytes=300)
    content = os.urandom(300)
    assert found.read(base64.b64encode(content).decode()) == content
    with pytest.raises(ApiError, match="exceeds the limit of 300 bytes"):
        found.read("data:image/png;base64," + base64.b64encode(os.urandom(303)).decode())
