"""What the hooked front end makes of images: vLLM's own prompts and places, under ids of ours, and what it leaves."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from prometheus_client import Counter
from tests.engines.vllm.conftest import SERVER_FLAGS
from tests.engines.vllm.engine import vllm_config
from tests.engines.vllm.image_site import awkward, data_url, picture, saved
from tests.engines.vllm.in_process import WithTower
from vllm.exceptions import RetryableRequestError, VLLMValidationError
from vllm.renderers import ChatParams
from vllm.renderers.registry import RENDERER_REGISTRY
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor

from routers import until
from servers import ServerProcess, serving
from vitwire import Client, Item
from vitwire.integrations.vllm import plugin
from vitwire.integrations.vllm.files import IMAGES
from vitwire.integrations.vllm.sizes import may_encode

Json = dict[str, Any]
LIMITS = {"max_model_len": 8192, "max_num_batched_tokens": 8192, "limit_mm_per_prompt": {"image": 10, "video": 1}}


@pytest.fixture(autouse=True)
def hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RENDERER_REGISTRY, "renderers", dict(RENDERER_REGISTRY.renderers))
    plugin.register()
    assert plugin.is_registered()


@pytest.fixture
def engines(checkpoints: dict[str, Path]) -> Iterator[Callable[..., WithTower]]:
    def engine(target: str, kind: str = "qwen3_vl", extra: Json | None = None, **arguments: Any) -> WithTower:
        settings = {"allow_caller_embeds": False, "timeout": 10.0} | (extra or {})
        config = vllm_config(checkpoints[kind], target, settings, **(LIMITS | arguments))
        return stack.enter_context(closing(WithTower(config, 1024)))

    with ExitStack() as stack:
        yield engine


def counted(of: Counter = IMAGES) -> dict[str, int]:
    samples = chain.from_iterable(each.samples for each in of.collect())
    return {each.labels["outcome"]: int(each.value) for each in samples if each.name.endswith("_total")}


def since(before: dict[str, int], of: Counter = IMAGES) -> dict[str, int]:
    return {name: more for name, value in counted(of).items() if (more := value - before.get(name, 0))}


def part(file: bytes, kind: str = "image/jpeg") -> Json:
    return {"type": "image_url", "image_url": {"url": data_url(file, kind)}}


def rendered(frontend: InputProcessor, parts: list[Json], **chat: Any) -> Json:
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}]
    extras = {name: chat[name] for name in ("mm_processor_kwargs",) if name in chat}
    (_,), (prompt,) = frontend.renderer.render_chat([messages], ChatParams(**chat), prompt_extras=extras)
    return dict(prompt)


def queued(vllm: WithTower, prompt: Json) -> str:
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    return vllm.queue(vllm.frontend.process_inputs(f"queued-{time.monotonic_ns()}", prompt, params, ("generate",)))


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "internvl", "dots_ocr"])
def test_prompts_are_those_of_the_tower(
    kind: str, engines: Callable[..., WithTower], checkpoints: dict[str, Path]
) -> None:
    """Token ids and places, of files alone and together; rows are the server's; the tower's ids are different."""
    tower = InputProcessor(vllm_config(checkpoints[kind], "localhost:1", **LIMITS, ec_transfer_config=None))
    with serving(checkpoints[kind], *SERVER_FLAGS) as server, Client(server.target) as client:
        vllm, before = engines(server.target, kind), counted()
        files = list(awkward().values())
        name = vllm.add([part(file) for file in files])
        vllm.run(name)
        assert not vllm.errors
        rows = torch.cat([each.torch() for each in client.encode_images(files)])
        assert torch.equal(torch.cat(vllm.gathered[name]), rows)
        for chosen in (*([file] for file in files), files[:3]):
            parts = [part(file) for file in chosen]
            ours, theirs = rendered(vllm.frontend, parts), rendered(tower, parts)
            for field in ("prompt_token_ids", "mm_placeholders"):
                assert ours[field] == theirs[field], field
            assert not set(ours["mm_hashes"]["image"]) & set(theirs["mm_hashes"]["image"])
        assert since(before) == {"accepted": 2 * len(files) + 3}
        assert vllm.encoded == []


def test_images_that_the_encoder_does_not_take_are_mixed_with_those_that_it_does(
    engines: Callable[..., WithTower], server: ServerProcess, client: Client
) -> None:
    """In any order, also when vLLM's caches know some of them."""
    vllm, before = engines(server.target), counted()
    tiff = saved(Image.open(BytesIO(picture(64, 64, seed=8))), "TIFF")
    first, second = picture(64, 64, seed=6), picture(96, 64, seed=7)
    orders = [[first, tiff, second], [tiff, second, first], [tiff], [second, second, tiff, first]]
    rows = {
        file: each.torch() for file, each in zip((first, second), client.encode_images([first, second]), strict=True)
    }
    for order in orders:
        name = vllm.add([part(file) for file in order])
        vllm.run(name)
        assert not vllm.errors
        for file, gathered in zip(order, vllm.gathered[name], strict=True):
            assert torch.equal(gathered, rows.get(file, torch.ones_like(gathered)))
    assert len(vllm.encoded) == 1  # in vLLM's encoder cache afterwards
    assert since(before) == {"accepted": 7, "format": 4}


def test_options_that_the_encoder_does_not_have_are_the_towers(
    engines: Callable[..., WithTower], server: ServerProcess, client: Client
) -> None:
    """The encoder has those that set the size of images."""
    vllm, before = engines(server.target), counted()
    info = vllm.frontend.renderer.mm_processor.info
    for options, may in [({}, True), ({"max_pixels": 9}, True), ({"fps": 2}, True), ({"image_mean": [0, 0, 0]}, False)]:
        assert may_encode(info, options) is may, options
    assert not may_encode(info, {"images_kwargs": {"resample": 0}})
    photo = part(picture(640, 480))
    small: Json = {"mm_processor_kwargs": {"max_pixels": 128 * 128}}
    for chat in (
        small,
        {"mm_processor_kwargs": {"resample": 0}},
        {"mm_processor_kwargs": {"min_pixels": 100_000, "max_pixels": 5_000}},
        {"media_io_kwargs": {"image": {"rgba_background_color": [0, 0, 0]}}},
        {},
        small,  # though the server has the image by now, and vLLM's cache has lost it
        {},
    ):
        vllm.frontend.renderer.clear_mm_cache()
        name = queued(vllm, rendered(vllm.frontend, [photo], **chat))
        vllm.run(name)
        if chat is small:
            item = Item(encoded=picture(640, 480), options=small["mm_processor_kwargs"])
            assert torch.equal(vllm.gathered[name][0], client.encode([item])[0].torch())
    assert since(before) == {"options": 3, "accepted": 4}
    assert len(vllm.encoded) == 3
    assert not vllm.errors


def test_a_server_that_goes_away(engines: Callable[..., WithTower], checkpoint: Path) -> None:
    """Before it accepts an image the tower encodes; what it accepted and lost is sent again, or fails in time."""
    with serving(checkpoint, *SERVER_FLAGS) as server:
        vllm, before = engines(server.target, extra={"timeout": 3.0, "accept_seconds": 0.5}), counted()
        requests = [rendered(vllm.frontend, [part(picture(64, 64, seed=seed))]) for seed in (20, 21)]
        assert since(before) == {"accepted": 2}
        os.kill(server.process.pid, signal.SIGSTOP)
        vllm.run(vllm.add([part(picture(64, 64, seed=22))]))
        assert since(before) == {"accepted": 2, "slow": 1}
        os.kill(server.process.pid, signal.SIGCONT)
        port = server.port
    vllm.run(vllm.add([part(picture(64, 64, seed=23))]))
    assert since(before) == {"accepted": 2, "slow": 1, "unavailable": 1}
    assert len(vllm.encoded) == 2
    lost, again = (queued(vllm, prompt) for prompt in requests)
    start = time.monotonic()
    vllm.run(lost)
    assert time.monotonic() - start < 10
    assert lost in vllm.errors
    vllm.abort(again)
    with serving(checkpoint, *SERVER_FLAGS, "--port", str(port)), Client(server.target, wait_for_ready=True) as client:
        client.model()
        again = queued(vllm, requests[1])
        vllm.run(again)
        (rows,) = client.encode_images([picture(64, 64, seed=21)])
    assert again not in vllm.errors
    assert vllm.stats["resent"] == 1
    assert torch.equal(vllm.gathered[again][0], rows.torch())


def test_a_server_that_hangs_is_asked_again(engines: Callable[..., WithTower], checkpoint: Path) -> None:
    """After four images in a row that were too slow, uploads pause for a second, and not for ever."""
    with serving(checkpoint, *SERVER_FLAGS) as server:
        vllm, before = engines(server.target, extra={"accept_seconds": 0.3}), counted()
        vllm.run(vllm.add([part(picture(64, 64, seed=60))]))
        os.kill(server.process.pid, signal.SIGSTOP)
        for seed in range(61, 66):
            vllm.add([part(picture(64, 64, seed=seed))])
        assert since(before) == {"accepted": 1, "slow": 5}, "the fifth names why there is a pause"
        os.kill(server.process.pid, signal.SIGCONT)
        seeds = iter(range(66, 1000))

        def accepted() -> bool:
            vllm.add([part(picture(64, 64, seed=next(seeds)))])
            return since(before)["accepted"] > 1

        until(accepted)


def test_a_small_cache_loses_nothing(engines: Callable[..., WithTower], checkpoint: Path) -> None:
    """Each embedding is evicted before it is fetched, and made again."""
    with serving(checkpoint, "--cache-bytes", "20000", "--dtype", "bfloat16", "--graphs", "off") as server:
        vllm = engines(server.target)
        names = [vllm.add([part(picture(96, 96, seed=seed))]) for seed in range(30, 42)]
        until(lambda: server.metric("vitwire_items_total") == len(names))
        vllm.run(*names)
        assert not vllm.errors
        assert vllm.stats["resent"] > 0
        assert vllm.encoded == []


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen3_5"])
def test_an_engine_without_a_tower(kind: str, engines: Callable[..., WithTower], checkpoints: dict[str, Path]) -> None:
    """Takes the images that the encoder takes; for others there is an error, which says whether to try again."""
    files = [picture(64, 64), picture(96, 64)]
    with serving(checkpoints[kind], *SERVER_FLAGS) as server, Client(server.target) as client:
        vllm = engines(server.target, kind, limit_mm_per_prompt={"image": 0, "video": 0})
        name = vllm.add([part(file) for file in files])
        vllm.run(name)
        assert not vllm.errors
        assert all(map(torch.equal, vllm.gathered[name], [each.torch() for each in client.encode_images(files)]))
        with pytest.raises(VLLMValidationError, match="no tower; the encoder takes JPEG"):
            vllm.add([part(saved(Image.new("RGB", (64, 64)), "TIFF"))])
        with pytest.raises(VLLMValidationError, match=r"no tower \(options\)"):
            vllm.add([part(picture(64, 64))], chat={"mm_processor_kwargs": {"resample": 0}})
        messages: list[Any] = [{"role": "user", "content": [part(files[0])]}]
        (_,), (pixels,) = vllm.frontend.renderer.render_chat([messages], ChatParams(), skip_mm_cache=True)
        vllm.run(name := queued(vllm, pixels))  # as of /v1/systemone
        assert name in vllm.errors
    with pytest.raises(RetryableRequestError, match="the encoder is unavailable, and this engine has no tower"):
        vllm.add([part(picture(64, 64))])


def test_without_a_tower_a_full_encoder_is_asked_again(
    engines: Callable[..., WithTower], checkpoints: dict[str, Path]
) -> None:
    with serving(checkpoints["qwen2_vl"], *SERVER_FLAGS, "--max-queued-items", "1") as server:
        vllm = engines(server.target, "qwen2_vl", limit_mm_per_prompt={"image": 0, "video": 0})
        with pytest.raises(RetryableRequestError, match="unavailable"):
            vllm.add([part(picture(640, 640, seed=seed)) for seed in range(8)])


def test_callers_bring_no_embeddings(engines: Callable[..., WithTower], server: ServerProcess) -> None:
    vllm = engines(server.target)
    grid = {"image_grid_thw": [1, 4, 4]}
    attacks: list[Json] = [
        {"type": "image_embeds", "image_embeds": grid, "uuid": "another's"},
        {"type": "image_embeds", "image_embeds": None, "uuid": "another's"},
        {"type": "image_url", "image_url": None, "uuid": "another's"},
    ]
    for attack in attacks:
        with pytest.raises((VLLMValidationError, ValueError), match=r"mm-embeds|not embeddings"):
            vllm.add([attack])
    first, second = (vllm.add([part(picture(64, 64, seed=seed)) | {"uuid": "same"}]) for seed in (50, 51))
    vllm.run(first, second)
    assert not torch.equal(vllm.gathered[first][0], vllm.gathered[second][0])
    theirs = vllm.request(first).mm_features[0].identifier
    name = vllm.add([part(picture(64, 64, seed=52))], ec_transfer_params={"content_ids": [theirs]})
    vllm.run(name)
    assert not torch.equal(vllm.gathered[name][0], vllm.gathered[first][0])


def test_the_ids_of_several_api_servers(
    engines: Callable[..., WithTower], server: ServerProcess, tmp_path: Path, checkpoint: Path
) -> None:
    """Need one secret, which makes them equal; without it they are secret."""
    (key := tmp_path / "key").write_bytes(bytes(range(32)))
    extra = {"content_key_file": str(key), "allow_caller_embeds": False}
    config = vllm_config(checkpoint, server.target, extra)
    file = part(picture(64, 64))
    ids = [rendered(InputProcessor(config), [file])["mm_hashes"]["image"][0] for _ in range(2)]
    assert ids[0] == ids[1]
    config = vllm_config(checkpoint, server.target, {"allow_caller_embeds": False})
    ids += [rendered(InputProcessor(config), [file])["mm_hashes"]["image"][0] for _ in range(2)]
    assert len(set(ids)) == 3
    config.parallel_config._api_process_count = 2
    with pytest.raises(ValueError, match="content_key_file: several API servers"):
        InputProcessor(config)
    (short := tmp_path / "short").write_bytes(bytes(8))
    config = vllm_config(checkpoint, server.target, {"content_key_file": str(short)})
    with pytest.raises(ValueError, match=r"content_key_file .*short: the key has 8 bytes"):
        InputProcessor(config)


def test_an_engine_whose_front_end_is_not_hooked_does_not_start(
    engines: Callable[..., WithTower], server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    with pytest.raises(ValueError, match=r"Rust front end loads no plugins.*allow_caller_embeds"):
        engines(server.target)
    monkeypatch.delenv("VLLM_USE_RUST_FRONTEND")
    RENDERER_REGISTRY.renderers["hf"] = ("vllm.renderers.hf", "HfRenderer")
    monkeypatch.setattr(plugin, "version", lambda _: "0.34.0")
    plugin.register()
    assert not plugin.is_registered()
    with pytest.raises(ValueError, match=r"not hooked.*vLLM 0\.33.*allow_caller_embeds"):
        engines(server.target)


def test_nothing_is_hooked_without_the_connector(checkpoint: Path) -> None:
    plain = InputProcessor(vllm_config(checkpoint, "localhost:1", ec_transfer_config=None))
    assert type(plain.renderer).__module__ == "vllm.renderers.hf"
    assert np.prod(rendered(plain, [part(picture(64, 64))])["mm_kwargs"]["image"][0]["pixel_values"].data.shape)
