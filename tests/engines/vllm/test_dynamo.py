"""Dynamo's worker with Vitwire as its custom encoder: Dynamo's code loads and calls it, and makes vLLM's prompts."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import tests.engines.vllm.cpu_platform  # noqa: F401  # before the rest of vLLM
import torch
from dynamo.llm import HttpError
from dynamo.llm.exceptions import InvalidArgument
from tests.engines.vllm.dynamo_worker import IMAGE_TOKEN, Workers, images_of, prompt
from tests.engines.vllm.image_site import SIZES, data_url, image_site, picture
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor

from entered import entered
from servers import ServerProcess, serving
from vitwire import Client
from vitwire.integrations import dynamo as adapter

site = entered(image_site, scope="function")


@pytest.fixture(scope="module")
def vllm_frontend(dynamo_configs: dict[str, tuple[Any, Any]]) -> InputProcessor:
    return InputProcessor(dynamo_configs["qwen3_vl"][1])


async def test_a_request_reaches_vllm(dynamo_workers: Workers, client: Client, vllm_frontend: InputProcessor) -> None:
    """vLLM's front end reads the rows that the client gets for the same files, and expands the placeholders."""
    files = [picture(*size) for size in SIZES]
    expected = client.encode_images(files)
    found = await prompt(dynamo_workers(), *map(data_url, files))
    request = vllm_frontend.process_inputs("request", found, SamplingParams(), ("generate",))
    assert len(request.mm_features) == len(files)
    for feature, embedding in zip(request.mm_features, expected, strict=True):
        data = feature.data.get_data()
        assert data["image_embeds"].dtype == torch.bfloat16
        assert torch.equal(data["image_embeds"], embedding.torch())
        assert data["image_grid_thw"].tolist() == list(embedding.grid)
    assert request.prompt_token_ids.count(IMAGE_TOKEN) == sum(each.shape[0] for each in expected)


async def test_a_model_without_deepstack_levels(dynamo_workers: Workers, checkpoints: dict[str, Path]) -> None:
    file = picture(*SIZES[0])
    with serving(checkpoints["qwen3_5"], "--dtype", "bfloat16", "--graphs", "off") as server:
        found = await prompt(dynamo_workers("qwen3_5", VITWIRE_TARGET=server.target), data_url(file))
        with Client(server.target) as client:
            (expected,) = client.encode_images([file])
    assert torch.equal(images_of(found)[0], expected.torch())


async def test_requests_at_once(dynamo_workers: Workers, client: Client, server: ServerProcess) -> None:
    """Each of many requests gets the rows of its images; the server has several in a batch."""
    files = [[picture(*SIZES[n % 4], seed=n), picture(*SIZES[(n + 1) % 4], "PNG", seed=100 + n)] for n in range(24)]
    names = ("vitwire_items_total", "vitwire_batch_items_count")
    before = [server.metric(name) for name in names]
    worker = dynamo_workers()
    found = await asyncio.gather(*(prompt(worker, *map(data_url, pair)) for pair in files))
    items, batches = (server.metric(name) - old for name, old in zip(names, before, strict=True))
    assert items == 2 * len(files)
    assert 0 < batches < items
    for pair, each in zip(files, found, strict=True):
        expected = client.encode_images(pair)
        rows, grids = images_of(each)
        assert torch.equal(rows, torch.cat([embedding.torch() for embedding in expected]))
        assert grids == [list(embedding.grid) for embedding in expected]


BAD = {
    data_url(b"nonsense" * 100): "image: .*is not a JPEG",
    data_url(picture(200, 200)[:1500]): "image: .*truncated",
    data_url(b"\0\0\0\x18ftypmp42" + bytes(100), "video/mp4"): "image: .*is not a JPEG",
    data_url(b""): "image: is empty",
    "data:image/png;base64,?": "image: .*invalid base64",
    "data:image/png": "image: .*expected data:...;base64,",
}
REFUSED = {
    "": "URL is empty",
    "/etc/hostname": "scheme '' not allowed",
    "file:///etc/hostname": "scheme 'file' not allowed",
    "http://example.com/a.jpg": "http:// URLs are not allowed",
    "https://127.0.0.1/a.jpg": "blocked range",
    "https://localhost/a.jpg": "is blocked",
    "https://[": "Invalid IPv6 URL",
    f"data:image/png;base64,{'A' * (17 << 20)}": "exceeds the 16777216-byte limit",
}


async def test_a_bad_image_fails_its_request_alone(dynamo_workers: Workers, client: Client) -> None:
    """With InvalidArgument, or ValueError for what Dynamo refuses; other requests at the same time are not affected."""
    worker, good, wrong = dynamo_workers(), data_url(picture(*SIZES[0])), BAD | REFUSED
    calls = [request for bad in wrong for request in (prompt(worker, good, bad), prompt(worker, good))]
    results = await asyncio.gather(*calls, return_exceptions=True)
    (expected,) = client.encode_images([picture(*SIZES[0])])
    for bad, failure, found in zip(wrong, results[::2], results[1::2], strict=True):
        with pytest.raises(InvalidArgument if bad in BAD else ValueError, match=wrong[bad]):
            raise failure
        assert len(str(failure)) < 500
        assert torch.equal(images_of(found)[0], expected.torch())


async def test_dynamo_refuses_clips(dynamo_workers: Workers) -> None:
    request = {"token_ids": [1], "multi_modal_data": {"video_url": [{"Url": "https://example.com/a.mp4"}]}}
    with pytest.raises(InvalidArgument, match="image inputs only"):
        await dynamo_workers()._assemble_custom_encoder_prompt(request, "request")


async def test_urls(dynamo_workers: Workers, client: Client, site: str, monkeypatch: Any) -> None:
    """Dynamo's client fetches them, within Dynamo's limits."""
    monkeypatch.setattr(adapter, "_FETCH_SECONDS", 1.0)
    worker = dynamo_workers(DYN_MM_ALLOW_INTERNAL="1", DYN_MM_MAX_FILE_SIZE_MB="2")
    (expected,) = client.encode_images([picture(*SIZES[0])])
    assert torch.equal(images_of(await prompt(worker, f"{site}/photo"))[0], expected.torch())
    wrong = {
        f"{site}/missing": "image: its URL answered with HTTP status 404",
        f"{site}/stuck": "image: its URL did not answer in time",
        f"{site}/large": "download limit",
        f"{site}/empty": "image: is empty",
        f"{site}/to-a-file": "scheme 'file' not allowed",
        "http://127.0.0.1:1/": "image: no connection to the host of its URL",
    }
    results = await asyncio.gather(*(prompt(worker, url) for url in wrong), return_exceptions=True)
    for (url, message), failure in zip(wrong.items(), results, strict=True):
        dynamos = url.endswith(("/large", "/to-a-file"))
        with pytest.raises(ValueError if dynamos else InvalidArgument, match=message):
            raise failure if isinstance(failure, Exception) else AssertionError(url)


async def test_a_lost_or_late_server_is_not_the_callers_fault(dynamo_workers: Workers, checkpoint: Path) -> None:
    image = data_url(picture(*SIZES[0]))
    with serving(checkpoint, "--graphs", "off") as server:
        worker = dynamo_workers(VITWIRE_TARGET=server.target, VITWIRE_TIMEOUT="2")
        assert images_of(await prompt(worker, image))[1] == [[1, 8, 8]]
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            with pytest.raises(TimeoutError):
                await prompt(worker, image)
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        assert images_of(await prompt(worker, image))[1] == [[1, 8, 8]]
    with pytest.raises(HttpError, match="503"):
        await prompt(worker, image)


async def test_a_full_server(dynamo_workers: Workers, checkpoint: Path) -> None:
    """Some of many requests get 529, the others their rows."""
    urls = [data_url(picture(1600, 1600, seed=seed)) for seed in range(30)]
    with serving(checkpoint, "--graphs", "off", "--max-queued-items", "1") as server:
        worker = dynamo_workers(VITWIRE_TARGET=server.target, VITWIRE_TIMEOUT="2")
        results = await asyncio.gather(*(prompt(worker, url) for url in urls), return_exceptions=True)
    failures = [each for each in results if isinstance(each, BaseException)]
    codes = [each.code if isinstance(each, HttpError) else type(each) for each in failures]
    assert set(codes) <= {529, TimeoutError}
    assert 0 < codes.count(529) < len(urls)


async def test_a_cancelled_request(dynamo_workers: Workers, site: str, monkeypatch: Any) -> None:
    """Its images that have not begun are dropped, and the worker goes on."""
    monkeypatch.setattr(adapter.VitwireEncoder, "preprocess_concurrency", 1)
    worker = dynamo_workers(DYN_MM_ALLOW_INTERNAL="1")
    monkeypatch.setattr(adapter, "_FETCH_SECONDS", 1.0)
    call = asyncio.create_task(prompt(worker, *[f"{site}/stuck"] * 20))
    await asyncio.sleep(0.2)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    found = await asyncio.wait_for(prompt(worker, data_url(picture(*SIZES[0]))), 5)
    assert images_of(found)[1] == [[1, 8, 8]]
