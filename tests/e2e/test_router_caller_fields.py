"""Embeddings and ids that callers send, on every path that `vitwire router` passes on."""

import gzip
import json
import subprocess
from pathlib import Path
from typing import Any

import httpx2
import pytest

from entered import entered
from routers import CHAT, EngineProcess, RouterProcess, picture, router
from servers import PYTHON, ServerProcess, serving
from vitwire import Client, Item

Json = dict[str, Any]
UUID = "f" * 64
NOBODY = "127.0.0.1:1"
HTTP = httpx2.Client(timeout=60)
"""Each client of its own would load certificates."""
URL = {"url": "https://example.com/x"}
EMBEDS: list[Json] = [
    {"type": "image_embeds", "image_embeds": {"image_embeds": "AA", "image_grid_thw": "AA"}},
    {"type": "video_embeds", "video_embeds": {"video_embeds": "AA", "video_grid_thw": "AA"}},
    {"type": "audio_embeds", "audio_embeds": "AA"},
    {"type": "prompt_embeds", "data": "AA"},
    {"type": "image_pil", "image_pil": "AA"},
    {"type": "image_embeds", "image_embeds": None},
]
MEDIA: list[Json] = [
    {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
    {"type": "audio_url", "audio_url": URL},
    {"type": "audio_url", "audio_url": None},
]


def in_chat(*parts: Json) -> Json:
    return {"model": "tiny", "messages": [{"role": "user", "content": list(parts)}]}


def in_batch(*parts: Json) -> Json:
    return {"model": "tiny", "messages": [in_chat(*parts)["messages"]] * 2}


def in_score(*parts: Json) -> Json:
    return {"model": "tiny", "queries": "q", "documents": [{"content": list(parts)}]}


PATHS = {
    CHAT: in_chat,
    f"{CHAT}/batch": in_batch,
    f"{CHAT}/render": in_chat,
    "/v1/embeddings": in_chat,
    "/v1/completions": in_chat,
    "/v1/anything/new": in_chat,
    "/pooling": in_chat,
    "/classify": in_chat,
    "/tokenize": in_chat,
    "/score": in_score,
    "/v1/score": in_score,
    "/rerank": in_score,
    "/v1/rerank": in_score,
}

proxy = entered(lambda stand_in: router(NOBODY, stand_in.url))
"""It needs no encoder for these requests."""


def posted(proxy: RouterProcess, path: str, body: Json | bytes, **headers: str) -> httpx2.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return HTTP.post(proxy.url + path, content=content, headers={"content-type": "application/json"} | headers)


def got(received: EngineProcess) -> Any:
    (request,) = received.requests()
    return request["body"] if isinstance(request["body"], dict) else json.loads(request["body"])


@pytest.mark.parametrize("path", PATHS)
def test_embeddings_are_refused_by_name(proxy: RouterProcess, received: EngineProcess, path: str) -> None:
    for part in EMBEDS:
        answer = posted(proxy, path, PATHS[path](part | {"uuid": UUID}))
        name = part["type"]
        assert (answer.status_code, name in answer.text) == (400, True), (path, part, answer.text)
        assert "--allow-caller-embeds" in answer.text
    assert posted(proxy, path, {"model": "tiny", "prompt_embeds": "AA"}).status_code == 400
    assert received.requests() == []


@pytest.mark.parametrize("path", PATHS)
def test_ids_and_parameters_are_removed(proxy: RouterProcess, received: EngineProcess, path: str) -> None:
    for part in MEDIA:
        request = PATHS[path](part | {"uuid": UUID})
        transfer = {"ec_transfer_params": {"content_ids": [UUID]}}
        answer = posted(proxy, path, request | transfer | {"vllm_xargs": {"ec_transfer_params": "x"}})
        assert answer.status_code == 200, answer.text
        assert got(received) == PATHS[path](part) | {"vllm_xargs": {}}


def test_allowed_embeddings_have_no_ids(stand_in: EngineProcess, received: EngineProcess) -> None:
    with router(NOBODY, stand_in.url, "--allow-caller-embeds") as proxy:
        for path, request in PATHS.items():
            for part in EMBEDS:
                assert posted(proxy, path, request(part | {"uuid": UUID})).status_code == 200
                assert got(received) == request(part)
        nameless = {"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 4, 4]}}
        assert "expected rows" in posted(proxy, "/tokenize", in_chat(nameless)).text


@pytest.mark.parametrize(
    "path",
    [
        "/inference/v1/generate",
        "/generate",
        "/invocations",
        "/v1/../inference/v1/generate",
        "/v1/..%2Finference/v1/generate",
        "/v1/%2e%2e/inference%2Fv1/generate",
        "//v1/inference/v1/generate",
    ],
)
def test_paths_around_the_renderer_are_not_passed_on(proxy: RouterProcess, received: EngineProcess, path: str) -> None:
    url = httpx2.URL(proxy.url).copy_with(raw_path=path.encode())
    assert HTTP.post(url, json={"features": {"mm_hashes": {"image": [UUID]}}}).status_code == 404
    assert received.requests() == []


def test_messages_and_responses_are_not_passed_on(stand_in: EngineProcess, received: EngineProcess) -> None:
    """Their images would reach the engine, and its caches."""
    with router(NOBODY, stand_in.url) as proxy:
        for path in ("/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/v1/%72esponses", "/v1%2Fmessages"):
            url = httpx2.URL(proxy.url).copy_with(raw_path=path.encode())
            for method in ("POST", "GET", "DELETE"):
                answer = HTTP.request(method, url, json=in_chat(IMAGE), headers={"content-type": "application/json"})
                error = answer.json()["error"]
                assert (answer.status_code, error["code"], error["param"]) == (404, "unsupported_api", None)
                assert "own server takes messages and responses" in error["message"]
        assert proxy.metric("vitwire_router_requests_total", route="proxied", code="404") == 15
    assert received.requests() == []


def test_bodies_that_cannot_be_read_are_refused(proxy: RouterProcess, received: EngineProcess) -> None:
    part = MEDIA[2] | {"uuid": UUID}
    body = json.dumps(in_chat(part)).encode()
    for path in ("/pooling", CHAT, "/v1/embeddings"):
        assert posted(proxy, path, gzip.compress(body), **{"content-encoding": "gzip"}).status_code == 415
        assert posted(proxy, path, body[:-1]).status_code == 400
    for kind in ("multipart/form-data; boundary=B", "application/x-www-form-urlencoded", "Multipart/Mixed; boundary=B"):
        assert posted(proxy, "/pooling", b"--B--", **{"content-type": kind}).status_code == 415
        assert posted(proxy, CHAT, b"--B--", **{"content-type": kind}).status_code == 400
    twice = [("content-encoding", "identity"), ("content-encoding", "gzip")]
    assert HTTP.post(f"{proxy.url}/pooling", content=gzip.compress(body), headers=twice).status_code == 415
    assert received.requests() == []


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
@pytest.mark.parametrize("kind", ["application/json", "text/plain", "application/x-any", ""])
@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_bodies_are_read_whatever_is_said_of_them(
    proxy: RouterProcess, received: EngineProcess, method: str, kind: str, encoding: str
) -> None:
    content = json.dumps(in_chat(MEDIA[2] | {"uuid": UUID})).encode(encoding)
    headers = [("content-type", kind), ("content-type", "application/json")] if kind else []
    answer = HTTP.request(method, f"{proxy.url}/pooling", content=content, headers=headers)
    assert answer.status_code == 200, answer.text
    (request,) = received.requests()
    assert json.loads(request["body"]) == in_chat(MEDIA[2])
    assert request["headers"]["content-type"] == "application/json"


def test_large_bodies_are_read_in_a_worker(proxy: RouterProcess, received: EngineProcess) -> None:
    text = {"type": "text", "text": "x" * 200_000}
    assert posted(proxy, "/pooling", in_chat(text, MEDIA[0] | {"uuid": UUID})).status_code == 200
    assert got(received) == in_chat(text, MEDIA[0])
    assert posted(proxy, "/pooling", in_chat(text, EMBEDS[0])).status_code == 400


def test_sound_passes_as_it_is(proxy: RouterProcess, received: EngineProcess) -> None:
    """Its bytes may look like anything; engines read no parts in these forms."""
    file = b"\0\1uuid\xff{"
    form: Any = {"files": {"file": ("a.m4a", file)}, "data": {"model": "m"}}
    answer = HTTP.post(f"{proxy.url}/v1/audio/transcriptions", **form)
    assert answer.status_code == 200
    (request,) = received.requests()
    assert file.decode("latin-1") in request["body"]


server = entered(lambda checkpoints: serving(checkpoints("qwen3_vl"), "--cache-bytes", "100000000"))


IMAGE = {"type": "image_url", "image_url": {"url": picture()}}


def test_beside_an_encoded_image(server: ServerProcess, stand_in: EngineProcess, received: EngineProcess) -> None:
    with router(server.target, stand_in.url, "--mode=reference") as proxy:
        for part in (*EMBEDS, IMAGE | {"image_embeds": "AA"}):
            assert posted(proxy, CHAT, in_chat(IMAGE, part)).status_code == 400
        assert received.requests() == []
        request = in_chat(IMAGE | {"uuid": UUID}, MEDIA[0] | {"uuid": UUID}, IMAGE)
        answer = posted(proxy, CHAT, request | {"ec_transfer_params": {"content_ids": [UUID]}})
        assert answer.status_code == 200, answer.text
        body = got(received)
        first, sound, second = body["messages"][0]["content"]
        assert (first["uuid"], sound) == (second["uuid"], MEDIA[0])
        assert body["ec_transfer_params"] == {"content_ids": [first["uuid"]] * 2}
        assert UUID not in json.dumps(body)
        refused = posted(proxy, CHAT, in_chat(IMAGE) | {"mm_processor_kwargs": {"resample": 0}})
        assert refused.json()["error"]["param"] == "mm_processor_kwargs"


def test_ids_of_a_restarted_router(
    server: ServerProcess, stand_in: EngineProcess, received: EngineProcess, tmp_path: Path
) -> None:
    """A new random key names contents anew: the old ids are never met again, and the server is sent the files."""
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32 + b"\n")
    found = []
    for flags in ([], [], [f"--content-key-file={key}"], [f"--content-key-file={key}"]):
        with router(server.target, stand_in.url, "--mode=reference", *flags) as proxy:
            assert posted(proxy, CHAT, in_chat(IMAGE)).status_code == 200
            found.append(got(received)["messages"][0]["content"][0]["uuid"])
            assert ("random key" in Path(proxy.output).read_text()) is not bool(flags)
    assert found[2] == found[3]
    assert len(set(found)) == 3
    with Client(server.target) as client:
        (expected,) = client.encode_images([IMAGE["image_url"]["url"]])
        for each in found:
            assert (client.encode([Item(content_id=each)])[0].numpy() == expected.numpy()).all()


def started(*flags: str, **variables: str) -> str:
    """What a router that does not start says."""
    command = [str(Path(PYTHON).with_name("vitwire")), "router", "--port=0", *flags]
    done = subprocess.run([PYTHON, *command], capture_output=True, text=True, check=False, timeout=60, env=variables)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    return " ".join(done.stderr.split())


def test_keys_that_cannot_be_used(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("x" * 31)
    assert "the key has 31 bytes, expected 32 or more" in started(f"--content-key-file={key}")
    assert "--content-key-file" in started(f"--content-key-file={tmp_path / 'none'}")
    assert "not a regular file" in started(f"--content-key-file={tmp_path}")
    several = started(WEB_CONCURRENCY="4")
    assert "WEB_CONCURRENCY=4: workers with a random key each would name equal images differently" in several
    assert "--content-key-file" in several
