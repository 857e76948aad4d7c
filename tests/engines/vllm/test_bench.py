"""`make engine-bench` but for the GPU: vLLM's front end, scheduler and connector, a real server, all ways."""

import json
import signal
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from bench.engine import checkpoint, command, vllm_engine
from bench.engine.answers import Answer
from bench.engine.loads import Size
from bench.engine.requests import draw
from bench.engine.ways import Inline, Local, Reference, Way
from tests.engines.vllm.in_process import CoreClient
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


async def test_ways_differ_in_the_images_alone(model: Path, front: InputProcessor) -> None:
    with serving(model, *SERVER_FLAGS.split()) as server:
        async with AsyncClient(server.target) as client:
            (asked,) = await draw(Size(128, 2), 1, 10, client)
            ways: dict[str, Way] = {"local": Local(front), "inline": Inline(front, client)}
            ways["reference"] = Reference(front, client)
            cores, answers = {}, {}
            for name, way in ways.items():
                answers[name] = Answer()
                inputs = await way.inputs(asked, await way.prepare(asked, name), answers[name])
                cores[name] = front.process_inputs(name, inputs, SamplingParams(), ("generate",))
            rows = await client.encode([Item(content_id=f"reference-{index}") for index in range(2)])
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
    ways = ("--ways", "local,inline,reference,again")
    document = run("--sizes", "64x2", "--loads", "c1,p50", "--requests", "5", "--itl", *ways, "--out", str(out))
    assert document == json.loads(out.read_text())
    assert "error" not in document, document
    places = [(load, way) for load in ("c1", "p50") for way in ("local", "inline", "reference", "again")]
    assert [(row["load"], row["way"]) for row in document["streams"]] == places
    for row in document["streams"]:
        assert (row["size"], row["requests"], row["errors"]) == ("64x2", 5, 0)
        assert row["ttft_p99_ms"] >= row["ttft_p50_ms"] > 0 < row["itl_p99_ms"]
        assert row["requests_per_s"] > 0
    stages = ("submitted", "queued", "scheduled", "prefilled", "first_token")
    for row in document["timeline"]:
        assert all(row[later] >= row[earlier] >= 0 for earlier, later in pairwise(stages)), row
        assert ("accepted" in row) == ("stored" in row) == (row["way"] == "reference")
        assert ("server_encoded" in row) == (row["way"] in ("inline", "reference"))
    for row in document["against_local"]:
        assert (row["compared"], row["first_equal"], row["all_equal"]) == (5, 5, 5)
        assert row["ttft_p50_ms_ratio"] > 0
    assert [row["way"] for row in document["itl"]] == ["alone", "text", "local", "inline", "reference", "again"]
    assert all(row["itl_p99_ms"] >= row["itl_p50_ms"] > 0 for row in document["itl"])
    (core,) = in_process
    images = 2 * 5 * 4  # warmed up, at each load, and beside running generations
    assert len(core.engine.encoded) == 2 * images
    assert document["connector"]["fetched_items"] == core.engine.stats["fetched"] == images
    assert not core.engine.errors


def test_an_engine_that_fails_ends_the_run_with_what_was_measured(
    run: Run, in_process: list[CoreClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CoreClient, "add_request_async", None)
    document = run("--sizes", "64x1", "--loads", "c1", "--ways", "local,inline", "--requests", "2", code=1)
    assert "NoneType" in document["error"]
    assert document["engine"].startswith("vLLM 0.")


def test_a_run_that_is_ended_says_what_was_measured(
    run: Run, in_process: list[CoreClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ended(self: CoreClient, request: Any) -> None:
        """No request is answered."""
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(CoreClient, "add_request_async", ended)
    document = run("--sizes", "64x1", "--loads", "c1", "--ways", "local,inline", code=1)
    assert "OutOfTime" in document["error"]
    assert document["engine"].startswith("vLLM 0.")
