"""`make engine-bench` but for the GPU: vLLM's front end, scheduler and connector, a real server, all routes."""

import asyncio
import contextlib
import json
import signal
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import vllm.entrypoints.launchers.api_server.app_state  # CPython 3.11 may not parse it after a SIGTERM
import vllm.entrypoints.launchers.app  # noqa: F401  # as above
from bench.engine import checkpoint, command, photos, vllm_engine
from bench.engine.answers import Answer
from bench.engine.loads import Size
from bench.engine.requests import Asked, draw
from bench.engine.routes import Inline, Local, Reference, Route
from bench.engine.sending import Sender
from tests.engines.vllm.in_process import CoreClient, WithTower
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.input_processor import InputProcessor

from servers import PYTHON, serving
from vitwire import AsyncClient, Item

SERVER_FLAGS = "--cache-bytes 8000000 --dtype bfloat16 --graphs off"
Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module", autouse=True)
def environment() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in vllm_engine.ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "tiny"
    subprocess.run([PYTHON, "-m", checkpoint.__name__, str(folder), "--tiny"], check=True)
    return folder


@pytest.fixture(scope="module")
def front(model: Path) -> InputProcessor:
    chosen = vllm_engine.arguments(model, "127.0.0.1:1", images=4)
    return InputProcessor(AsyncEngineArgs(**chosen).create_engine_config())


async def test_routes_differ_in_the_images_alone(model: Path, front: InputProcessor) -> None:
    with serving(model, *SERVER_FLAGS.split()) as server:
        async with AsyncClient(server.target) as client:
            (asked,) = await draw(Size(128, 2), 1, 10, client)
            routes: dict[str, Route] = {"local": Local(front), "inline": Inline(front, client)}
            routes["reference"] = Reference(front, sender := await Sender.start(server.target))
            cores, answers = {}, {}
            for name, route in routes.items():
                answers[name] = Answer()
                inputs = await route.inputs(asked, await route.prepare(asked, name), answers[name])
                cores[name] = front.process_inputs(name, inputs, SamplingParams(), ("generate",))
            rows = await client.encode([Item(content_id=f"reference-{index}") for index in range(2)])
            for _ in range(6000):
                if "stored" in answers["reference"].moments:
                    break
                await asyncio.sleep(0.01)
            sender.close()
    assert cores["local"].prompt_token_ids == cores["inline"].prompt_token_ids == cores["reference"].prompt_token_ids
    for name, core in cores.items():
        assert [feature.identifier for feature in core.mm_features] == [f"{name}-0", f"{name}-1"]
        assert [feature.mm_position.length for feature in core.mm_features] == [16, 16]
    fields = {name: set(core.mm_features[0].data) for name, core in cores.items()}
    assert fields["local"] == {"pixel_values", "image_grid_thw"}
    assert fields["inline"] == {"image_embeds", "image_grid_thw"}
    assert fields["reference"] == {"image_grid_thw"}
    for feature, embedding in zip(cores["inline"].mm_features, rows, strict=True):
        assert feature.data["image_embeds"].data.equal(embedding.torch())
    assert {"accepted", "stored"} == answers["reference"].moments.keys()
    assert answers["reference"].spans.keys() == answers["inline"].spans.keys() == {"server_queued", "server_encoded"}


@pytest.fixture
def run(model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The benchmark with these flags; its document."""

    def bench(*flags: str, code: int = 0) -> dict[str, Any]:
        words = ["--model", str(model), "--tiny", "--text", "10", "--tokens", "3", "--server-flags", SERVER_FLAGS]
        monkeypatch.setattr("sys.argv", ["engine-bench", *words, *flags])
        with pytest.raises(SystemExit) as ended:
            command.main()
        assert ended.value.code == code
        document: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return document

    return bench


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> list[CoreClient]:
    """Engines in this process in place of vLLM's own process, which needs a GPU."""
    made: list[CoreClient] = []

    def client(**arguments: Any) -> CoreClient:
        made.append(CoreClient(**arguments))
        return made[-1]

    monkeypatch.setattr(EngineCoreClient, "make_async_mp_client", client)
    return made


def test_bench(run: Run, in_process: list[CoreClient], tmp_path: Path) -> None:
    out = tmp_path / "engine.json"
    routes = ("--routes", "local,inline,reference,again")
    document = run("--sizes", "128x2", "--loads", "c1,p50", "--requests", "5", "--itl", *routes, "--out", str(out))
    assert document == json.loads(out.read_text())
    assert "error" not in document, document
    places = [(load, route) for load in ("c1", "p50") for route in ("local", "inline", "reference", "again")]
    assert [(row["load"], row["route"]) for row in document["streams"]] == places
    for row in document["streams"]:
        assert (row["size"], row["requests"], row["errors"]) == ("128x2", 5, 0)
        assert row["ttft_p99_ms"] >= row["ttft_p50_ms"] > 0 < row["itl_p99_ms"]
        assert row["requests_per_s"] > 0
    stages = ("submitted", "queued", "scheduled", "prefilled", "first_token")
    for row in document["timeline"]:
        assert all(row[later] >= row[earlier] >= 0 for earlier, later in pairwise(stages)), row
        assert ("accepted" in row) == ("stored" in row) == (row["route"] == "reference")
        assert ("server_encoded" in row) == (row["route"] in ("inline", "reference"))
    for row in document["against_local"]:
        assert (row["compared"], row["first_equal"], row["all_equal"]) == (5, 5, 5)
        assert row["ttft_p50_ms_ratio"] > 0
    assert [row["route"] for row in document["itl"]] == ["alone", "text", "local", "inline", "reference", "again"]
    assert all(row["itl_p99_ms"] >= row["itl_p50_ms"] > 0 for row in document["itl"])
    text = document["itl"][1]["itl_p99_ms"]
    for row in document["itl"][2:]:
        assert row["itl_p99_to_text"] == pytest.approx(row["itl_p99_ms"] / text, abs=0.01)
    (core,) = in_process
    images = 2 * 5 * 4  # warmed up, at each load, and beside running generations
    assert len(core.engine.encoded) == 2 * images
    assert document["connector"]["fetched_items"] == core.engine.stats["fetched"] == images
    assert not core.engine.errors


def test_an_engine_that_fails_ends_the_run_with_what_was_measured(
    run: Run, in_process: list[CoreClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CoreClient, "add_request_async", None)
    document = run("--sizes", "128x1", "--loads", "c1", "--routes", "local,inline", "--requests", "2", code=1)
    assert "NoneType" in document["error"]
    assert document["engine"].startswith("vLLM 0.")


def test_a_run_that_is_ended_says_what_was_measured(
    run: Run, in_process: list[CoreClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ended(self: CoreClient, request: Any) -> None:
        """No request is answered."""
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(CoreClient, "add_request_async", ended)
    document = run("--sizes", "128x1", "--loads", "c1", "--routes", "local,inline", code=1)
    assert "OutOfTime" in document["error"]
    assert document["engine"].startswith("vLLM 0.")


def test_photographs_as_files(run: Run, in_process: list[CoreClient]) -> None:
    """vLLM's HTTP server, and real routers before it; the decoding is part of the request."""
    routes = ["local", "inline", "reference", "again"]
    words = ["--sizes", "128x2", "--loads", "c2", "--requests", "4", "--routes", ",".join(routes)]
    document = run(*words, "--from", "jpeg")
    assert "error" not in document, document
    assert [row["route"] for row in document["streams"]] == routes
    for row in document["streams"]:
        assert (row["requests"], row["errors"]) == (4, 0), document["skipped"]
        assert row["ttft_p99_ms"] >= row["ttft_p50_ms"] > 0
    assert [row["all_equal"] for row in document["against_local"]] == [4, 4, 4]
    (core,) = in_process
    images = 2 * 4 * 2  # warmed up, and at one load
    assert len(core.engine.encoded) == 2 * images
    assert document["connector"]["fetched_items"] == core.engine.stats["fetched"] == images
    assert not core.engine.errors


def test_an_engine_that_dies_is_an_error_of_each_request(
    run: Run, in_process: list[CoreClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over HTTP, where the run goes on."""
    monkeypatch.setattr(WithTower, "step", None)
    document = run("--sizes", "128x1", "--loads", "c2", "--requests", "4", "--routes", "local,inline", "--from", "jpeg")
    assert "error" not in document, document
    assert [(row["requests"], row["errors"]) for row in document["streams"]] == [(4, 4), (4, 4)]
    assert in_process[0].resources.engine_dead
    assert any(each.startswith("128x1 warm-up local: ") for each in document["skipped"]), document["skipped"]


@pytest.mark.parametrize("words", [b"", b"HTTP/1.1 200 OK\r\n\r\ndata: {}\n\n"], ids=["silent", "stalls"])
async def test_a_request_that_nobody_answers(words: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(photos, "_SECONDS", 0.5)
    hung_up = asyncio.Event()

    async def stuck(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(words)
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()
        hung_up.set()

    server = await asyncio.start_server(stuck, "127.0.0.1", 0)
    async with server, photos.session() as session:
        route = photos.Photos(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", session)
        answer = await route.answered(Asked([], [], []), b"{}", "stuck", 3)
        await asyncio.wait_for(hung_up.wait(), 60)
    assert answer.error == "not over after 0.5 s"
    assert answer.end > answer.start
