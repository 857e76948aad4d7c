"""The tower that is faster: forecasts by a clock of the test, and a real encoder whose load moves."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tests.engines.vllm.conftest import SERVER_FLAGS
from tests.engines.vllm.hooked import served
from tests.engines.vllm.image_site import data_url, picture
from tests.engines.vllm.test_front_end import asked, chat, image, outcomes

from entered import entered
from servers import ServerProcess, serving
from vitwire import Client, Item, Model
from vitwire._delivery.answers import Accepted
from vitwire.integrations.vllm import choice, rendering
from vitwire.integrations.vllm.choice import Average, Choice, ran
from vitwire.integrations.vllm.files import MediaFile, Reference
from vitwire.integrations.vllm.settings import Settings
from vitwire.integrations.vllm.sizes import Sized
from vitwire.integrations.vllm.uploads import Declined, Uploads

SECONDS = 60

encoder = entered(lambda checkpoint: serving(checkpoint, *SERVER_FLAGS))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the time on."""
    now = [100.0]
    monkeypatch.setattr(choice.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(choice, "ENGINE_PACE", pace := Average())
    pace.add(0.001)

    def move(seconds: float) -> None:
        now[0] += seconds

    return move


@pytest.mark.usefixtures("clock")
def test_without_both_forecasts_the_encoder_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Choice(1)
    made.accepted(60.0)
    assert not made.is_engine_earlier("image", 10)
    made.stored("image", 60.0, 60.0)
    assert made.is_engine_earlier("image", 10)
    monkeypatch.setattr(choice, "ENGINE_PACE", Average())
    assert not made.is_engine_earlier("image", 10)


@pytest.mark.parametrize(("forecast", "is_later"), [(0.29, False), (0.31, True)])
def test_margin(forecast: float, is_later: bool, clock: Callable[[float], None]) -> None:
    """The engine needs 0.1 s for 100 tokens: the encoder is left above twice that and 0.1 s more."""
    made = Choice(1)
    made.stored("image", 0.0, 0.0)
    made.accepted(forecast + 1)
    clock(1)
    assert made.is_engine_earlier("image", 100) == is_later


def test_the_engine_has_a_queue_too(clock: Callable[[float], None]) -> None:
    """It takes what it can do earlier, and its preparation counts; an item in half a second tries the encoder."""
    made = Choice(2)
    made.stored("image", 2.1, 0.0)
    assert sum(made.is_engine_earlier("image", 100) for _ in range(20)) == 10  # of 0.2 s each, for two front ends
    clock(1.1)
    assert [made.is_engine_earlier("image", 100) for _ in range(3)] == [False, True, True]
    clock(5)
    made.prepared("image", 6.0, 100)
    made.stored("video", 2.05, 0.0)
    assert not made.is_engine_earlier("image", 100)
    clock(1)
    assert made.is_engine_earlier("video", 100)
    clock(30)  # seven eighths of it are forgotten
    assert [made.is_engine_earlier("image", 100) for _ in range(2)] == [False, True]


def test_the_encoder_is_chosen_again(clock: Callable[[float], None], logged: pytest.LogCaptureFixture) -> None:
    """As soon as it is hardly later, but not within a second."""
    made = Choice(1)
    made.stored("image", 2.0, 0.0)
    assert made.is_engine_earlier("image", 100)
    for _ in range(12):
        made.stored("image", 0.12, 0.0)
    assert not made.is_engine_earlier("image", 100)
    assert len(logged.messages) == 1
    clock(1.0)
    assert not made.is_engine_earlier("image", 100)
    assert "the engine's tower" in logged.messages[0]
    assert "forecast 2.000 s for the encoder, 0.100 s for the engine" in logged.messages[0]
    assert "the encoder encodes" in logged.messages[1]


@pytest.mark.usefixtures("clock")
def test_clips_make_no_image_late() -> None:
    made = Choice(1)
    made.stored("image", 0.1, 0.0)
    made.stored("video", 5.0, 0.0)
    assert not made.is_engine_earlier("image", 100)
    assert made.is_engine_earlier("video", 100)


@pytest.mark.parametrize("sharers", [1, 0.1])
def test_few_items_or_a_slow_run_do_not_end_the_choice(sharers: float, clock: Callable[[float], None]) -> None:
    """A second passes between items; small images do not make large ones slow, nor does a run that compiles."""
    made = Choice(sharers)
    made.stored("image", 5.0, 0.0)
    for _ in range(20):
        ran(0.25, 4)
    ran(60.0, 1000)
    found = []
    for _ in range(8):
        clock(1)
        found.append(made.is_engine_earlier("image", 1000))
    assert found == [True, True, True, False] * 2
    assert not made.is_engine_earlier("image", 10_000)  # one item has one engine


def test_preparation_is_no_wait_for_other_uploads(
    clock: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two images of a request, one is the tower's at once, the other is accepted 5 s later."""

    async def processed(*_: object, **__: object) -> None:
        clock(0.5)

    monkeypatch.setattr(rendering.HfRenderer, "_process_tokens_async", processed)
    monkeypatch.setattr(rendering.VitwireRenderer, "_check", lambda *_, **__: None)
    renderer = object.__new__(rendering.VitwireRenderer)
    renderer._has_tower, renderer._choice = True, (made := Choice(1))
    ours, theirs = (MediaFile(b"", None) for _ in range(2))
    for file in (ours, theirs):
        file.tokens, file.upload = 512, Future()
    monkeypatch.setattr(ours, "decoded", lambda: clock(2) or "pixels")
    ours.upload.set_exception(rendering.Declined("slower"))
    settle = renderer._settle

    async def settled(items: list[object], index: int, file: MediaFile) -> None:
        await settle(items, index, file)
        if file is ours:
            clock(5)
            theirs.upload.set_result(Reference("name", {}))

    monkeypatch.setattr(renderer, "_settle", settled)
    asyncio.run(renderer._process_tokens_async({"multi_modal_data": {"image": [ours, theirs]}}))
    assert made._preparing["image"].value == pytest.approx(2.5 / 512)


def test_engines_of_front_ends() -> None:
    """A front end behind an outer load balancer has only its node's."""
    sizes = {"data_parallel_size": 8, "data_parallel_size_local": 2}
    assert rendering._engines(SimpleNamespace(**sizes, local_engines_only=False)) == 8
    assert rendering._engines(SimpleNamespace(**sizes, local_engines_only=True)) == 2


def test_warnings_are_bounded(clock: Callable[[float], None], logged: pytest.LogCaptureFixture) -> None:
    """One a second for each reason."""
    made = object.__new__(Uploads)
    made._warned = {}
    for reason in ("refused", "refused", "grid"):
        made._warn(reason, "%s", reason)
    clock(1)
    made._warn("grid", "%s", "later")
    assert logged.messages == ["refused", "grid", "later"]


def test_what_is_being_encoded_is_accepted_again(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, also by an encoder that is far behind; else four equal images would pause all uploads."""

    class Behind:
        async def model(self, *, refresh: bool) -> Model:
            return replace(model, prepared=("image",), embedding_width=192)

        async def iter_store(self, _: list[Item]) -> AsyncIterator[tuple[int, Accepted]]:
            yield 0, Accepted((1, 4, 4), 4, 60.0)
            await asyncio.sleep(60)

        async def store(self, _: list[Item]) -> None:
            await asyncio.sleep(60)

    monkeypatch.setattr(Settings, "uploading_client", lambda _: Behind())
    uploads = Uploads(Settings.of({"target": "localhost:1", "accept_seconds": 2}), 192, None)
    for _ in range(2):
        assert uploads.begin(b"file", "image", Sized(4, {})).result()
    with pytest.raises(Declined, match="grid"):
        uploads.begin(b"file", "image", Sized(5, {})).result()


@contextmanager
def flooded(encoder: ServerProcess) -> Iterator[None]:
    """Other users' images keep the encoder busy for about a second ahead."""
    ended = threading.Event()

    def flood(client: Client, seed: int) -> None:
        pixels = np.random.default_rng(seed).standard_normal((4096, 1536)).astype(np.float32)
        while not ended.is_set():
            client.encode([Item(pixels, (1, 64, 64))])

    with Client(encoder.target) as client:
        threads = [threading.Thread(target=flood, args=(client, seed)) for seed in range(12)]
        for each in threads:
            each.start()
        try:
            yield
        finally:
            ended.set()
            for each in threads:
                each.join()


def test_the_decision_follows_the_load(checkpoint: Path, encoder: ServerProcess, tmp_path: Path) -> None:
    """And is in the log, with both forecasts."""
    seeds = iter(range(10_000))
    with served(checkpoint, encoder.target, tmp_path, tower="vllm") as vllm:

        def ask_until(name: str, more: int) -> None:
            """Until so many more images have this outcome."""
            end, first = time.monotonic() + SECONDS, outcomes(vllm).get(name, 0)
            while outcomes(vllm).get(name, 0) < first + more:
                assert time.monotonic() < end, f"{outcomes(vllm)}\n{vllm.log()[-2000:]}"
                assert asked(vllm, chat(image(next(seeds))))[0] == 200

        tiff = picture(64, 64, "TIFF")
        assert asked(vllm, chat({"type": "image_url", "image_url": {"url": data_url(tiff, "image/tiff")}}))[0] == 200
        ask_until("accepted", 5)
        assert outcomes(vllm).keys() == {"accepted", "format"}
        with flooded(encoder):
            ask_until("slower", 5)
        ask_until("accepted", 20)
        before = outcomes(vllm)["slower"]
        ask_until("accepted", 5)
        assert outcomes(vllm)["slower"] == before
        log = vllm.log()
        assert vllm.counters()["vitwire_ec_tower_tokens_total"] > 0
    assert "the engine's tower encodes images and clips: forecast" in log
    assert "the encoder encodes images and clips: forecast" in log
