"""What callers of a router can do to each other in vLLM's front end, scheduler and encoder cache: nothing."""

import hashlib
import json
import re
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest
import torch
from tests.engines.vllm.conftest import Cached
from tests.engines.vllm.engine import Engine, vllm_config
from tests.engines.vllm.in_process import WithTower
from vllm.entrypoints.common.cli_args import make_arg_parser
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.utils.argparse_utils import FlexibleArgumentParser

from entered import entered
from routers import CHAT, EngineProcess, RouterProcess, engine, picture, router
from servers import ServerProcess
from vitwire import Client, Embedding, Item, Model, Report
from vitwire.integrations.vllm import image_part, reference_part
from vitwire_gateway.router.routing import refused_path

Json = dict[str, Any]
GRID = (1, 4, 4)
QUESTION = {"type": "text", "text": "?"}

stand_in = entered(engine)


@pytest.fixture
def towers(checkpoint: Path, server: ServerProcess) -> Iterator[Callable[..., WithTower]]:
    """Makes engines whose encoder cache takes rows that come with a request."""
    with ExitStack() as stack:
        yield lambda **arguments: stack.enter_context(
            closing(WithTower(vllm_config(checkpoint, server.target, **arguments)))
        )


def sent(proxy: RouterProcess, stand_in: EngineProcess, body: Json) -> Json | None:
    """What the engine gets of a request; None if the router refuses it."""
    stand_in.requests()
    request = Request(proxy.url + CHAT, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urlopen(request, timeout=60):
            pass
    except HTTPError as error:
        assert error.code == 400
        assert stand_in.requests() == []
        return None
    (found,) = stand_in.requests()
    return dict(found["body"])


def chat(*parts: Json, **fields: Any) -> Json:
    return {"model": "tiny", "messages": [{"role": "user", "content": [*parts, QUESTION]}], **fields}


def image(url: str) -> Json:
    return {"type": "image_url", "image_url": {"url": url}}


def queued(vllm: Engine, body: Json) -> str:
    """The name of a request in the engine, as vLLM's HTTP server makes it from a body."""
    request = ChatCompletionRequest.model_validate(body)
    chosen = request.build_chat_params(None, "auto").with_defaults(**media_options(vllm))
    (_,), (prompt,) = vllm.frontend.renderer.render_chat([request.messages], chosen)
    params = request.to_sampling_params(2, {})
    return vllm.queue(vllm.frontend.process_inputs(f"chatcmpl-{id(body)}", prompt, params, ("generate",)))


def media_options(vllm: Engine) -> Json:
    """vLLM's --media-io-kwargs, as its HTTP server adds them to each request."""
    return {"default_media_io_kwargs": vllm.config.model_config.multimodal_config.media_io_kwargs}


def public_id(model: Model, url: str) -> str:
    """The id of an image that anybody could compute, from what `GetModel` says and the file."""
    recipe = f"{model.weights_fingerprint} {model.dtype} {model.preparation_fingerprint}".encode()
    file = b64decode(url.partition(",")[2])
    return hashlib.sha256(hashlib.sha256(recipe).digest() + hashlib.sha256(file).digest()).hexdigest()


@pytest.mark.parametrize("mode", ["inline", "reference"])
@pytest.mark.parametrize("flags", [(), ("--allow-caller-embeds",)])
def test_a_victim_gets_the_rows_of_its_own_image(
    mode: str,
    flags: tuple[str, ...],
    towers: Callable[..., WithTower],
    stand_in: EngineProcess,
    server: ServerProcess,
    client: Client,
    model: Model,
) -> None:
    url = picture(64, 64, 5)
    (right,) = client.encode_images([url])
    wrong = np.full(right.shape, 0x3F80, "<u2")  # ones
    forged = Embedding(wrong, "bfloat16", model.deepstack_levels, Report(), right.grid)
    vllm = towers()
    with router(server.target, stand_in.url, f"--mode={mode}", *flags) as proxy:
        attack = sent(proxy, stand_in, chat(image_part(forged, model, uuid=public_id(model, url))))
        if attack:
            name = queued(vllm, attack)
            vllm.run(name)
            assert torch.equal(torch.cat(vllm.gathered[name]), forged.torch())
        victim = sent(proxy, stand_in, chat(image(url)))
        assert victim
        name = queued(vllm, victim)
        vllm.run(name)
    assert not vllm.errors
    torch.testing.assert_close(torch.cat(vllm.gathered[name]), right.torch(), rtol=0, atol=0.02)
    assert (attack is not None) is bool(flags)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_embeds", "image_embeds": None},
        {"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 4, 4]}},
        {"image_embeds": None},
        {"type": "image_url", "image_url": None},
        {"type": "text", "text": "t", "image_url": None},
        {"image_pil": None},
    ],
)
@pytest.mark.parametrize("flags", [(), ("--allow-caller-embeds",)])
def test_a_part_without_rows_says_nothing_of_others(
    part: Json, flags: tuple[str, ...], towers: Callable[..., WithTower], stand_in: EngineProcess, model: Model
) -> None:
    """With the id of a cached image vLLM answered such a request, and else refused it."""
    vllm = towers()
    with router("127.0.0.1:1", stand_in.url, *flags) as proxy:
        body = sent(proxy, stand_in, chat(part | {"uuid": "f" * 64}))
    if body:
        with pytest.raises((ValueError, VLLMValidationError), match=r"missing|None"):
            queued(vllm, body)


OPTIONS = {"image": {"image_mode": "RGB"}, "video": {"fps": 2}}


def test_references_work_with_media_options_of_the_engine(
    towers: Callable[..., WithTower], stand_in: EngineProcess, server: ServerProcess, client: Client
) -> None:
    """vLLM replaces uuids by hashes of them and the options."""
    urls = [picture(64, 64, 6), picture(64, 64, 7)]  # equal grids
    first, second = (each.torch() for each in client.encode_images(urls))
    vllm = towers(media_io_kwargs=OPTIONS)
    with router(server.target, stand_in.url, "--mode=reference") as proxy:
        body = sent(proxy, stand_in, chat(*map(image, (*urls, urls[0])), ec_transfer_params={"content_ids": ["x"] * 3}))
        assert body
        ids = [part["uuid"] for part in body["messages"][0]["content"][:3]]
        assert body["ec_transfer_params"] == {"content_ids": ids}
        name = queued(vllm, body)
        assert vllm.request(name).mm_features[0].identifier not in ids
        vllm.run(name)
    assert not vllm.errors
    torch.testing.assert_close(torch.cat(vllm.gathered[name]), torch.cat([first, second, first]), rtol=0, atol=0.02)


def test_content_ids_are_those_of_the_last_references(engine: Engine, cached: Cached, model: Model) -> None:
    """vLLM puts the images of earlier turns before those of a request, and encodes images with pixels itself."""
    old, new = cached("old"), cached("new")
    name = engine.add([reference_part(GRID, model, each) for each in ("old", "new")], ec_transfer_params=ids("new"))
    engine.run(name)
    assert not engine.errors
    assert all(map(torch.equal, engine.gathered[name], (old.torch(), new.torch())))
    parts = [reference_part(GRID, model, each) for each in ("old", "new")]
    options = {"media_io_kwargs": OPTIONS}
    name = engine.add(parts, chat=options, ec_transfer_params=ids("old", "new"))
    engine.run(name)
    assert all(map(torch.equal, engine.gathered[name], (old.torch(), new.torch())))
    assert not engine.errors
    shifted = engine.add(parts, chat={"media_io_kwargs": {"image": {"image_mode": "L"}}}, ec_transfer_params=ids("new"))
    engine.run(shifted)
    assert engine.errors == {shifted}, "the first has an id that nobody knows"


def ids(*names: str) -> Json:
    return {"content_ids": list(names)}


@pytest.mark.parametrize("params", ["text", ["list"], {"content_ids": "text"}, {"content_ids": [1]}, {}, None])
def test_no_parameters_end_the_scheduler(params: object, engine: Engine, cached: Cached, model: Model) -> None:
    """`vllm_xargs` may have a text of this name."""
    embedding = cached("any")
    name = engine.add([reference_part(GRID, model, "any")], ec_transfer_params=params)
    engine.run(name)
    assert not engine.errors
    assert torch.equal(torch.cat(engine.gathered[name]), embedding.torch())


_NAMES = re.compile("embeds|uuid|hash|_pil|features|ec_transfer")
_CHECKED = {"audio_embeds", "ec_transfer_params", "image_embeds", "prompt_embeds", "uuid", "video_embeds"}


def test_every_route_that_is_passed_on_has_only_fields_that_are_checked() -> None:
    """Those of vLLM's whole API. Bodies of other types are forms of sound."""
    tasks = ("generate", "transcription", "embed", "classify", "token_embed", "token_classify", "plugin", "render")
    described = build_app(make_arg_parser(FlexibleArgumentParser()).parse_args([]), tasks).openapi()
    schemas, passed, kept = described["components"]["schemas"], set(), set()
    for path, methods in described["paths"].items():
        for each in methods.values():
            content = each.get("requestBody", {}).get("content", {})
            names = {name for name in fields(content, schemas, set()) if _NAMES.search(name)}
            if refused_path(path, has_engine=True):
                kept |= names
                continue
            passed |= names
            assert content.keys() <= {"application/json"} or path.startswith("/v1/audio/"), path
    assert passed <= _CHECKED
    assert "mm_hashes" in kept, "of /inference/v1/generate"


def fields(value: Any, schemas: Json, seen: set[str]) -> set[str]:
    """The names of all fields that a schema has."""
    if isinstance(value, list):
        return set().union(*(fields(each, schemas, seen) for each in value))
    if not isinstance(value, dict):
        return set()
    found = set(value.get("properties", ()))
    name = str(value.get("$ref", "")).rpartition("/")[2]
    if name and name not in seen:
        seen.add(name)
        found |= fields(schemas[name], schemas, seen)
    return found.union(*(fields(each, schemas, seen) for each in value.values()))


def test_a_restarted_router_asks_anew(stand_in: EngineProcess, server: ServerProcess, tmp_path: Path) -> None:
    """With a random key no old id is known; with a file all are."""
    key = tmp_path / "key"
    key.write_text("k" * 64)
    body = chat(image(picture(64, 64, 9)))

    def named(*flags: str) -> str:
        with router(server.target, stand_in.url, "--mode=reference", *flags) as proxy:
            found = sent(proxy, stand_in, body)
            assert found
            return str(found["messages"][0]["content"][0]["uuid"])

    first, second = named(), named()
    kept, again = named(f"--content-key-file={key}"), named(f"--content-key-file={key}")
    assert kept == again
    assert len({first, second, kept}) == 3
    with Client(server.target) as client:
        rows = [client.encode([Item(content_id=each)])[0].numpy() for each in (first, second, kept)]
    assert all(np.array_equal(rows[0], each) for each in rows)
