"""The tower that is faster: forecasts by a clock of the test, and a real encoder whose load moves."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tests.engines.vllm.conftest import SERVER_FLAGS
from tests.engines.vllm.hooked import served
from tests.engines.vllm.image_site import data_url, picture
from tests.engines.vllm.test_front_end import asked, chat, image, outcomes

from servers import ServerProcess, serving
from vitwire import Client, Item
from vitwire.integrations.vllm import choice
from vitwire.integrations.vllm.choice import Average, Choice

SECONDS = 60


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
    made.stored(60.0, 60.0)
    assert made.is_engine_earlier("image", 10)
    monkeypatch.setattr(choice, "ENGINE_PACE", Average())
    assert not made.is_engine_earlier("image", 10)


@pytest.mark.parametrize(("forecast", "is_later"), [(0.29, False), (0.31, True)])
def test_margin(forecast: float, is_later: bool, clock: Callable[[float], None]) -> None:
    """The engine needs 0.1 s for 100 tokens: the encoder is left above twice that and 0.1 s more."""
    made = Choice(1)
    made.stored(0.0, 0.0)
    made.accepted(forecast + 1)
    clock(1)
    assert made.is_engine_earlier("image", 100) == is_later


def test_the_engine_has_a_queue_too(clock: Callable[[float], None]) -> None:
    """It takes what it can do earlier, and its preparation counts; an item in half a second tries the encoder."""
    made = Choice(2)
    made.stored(2.05, 0.0)
    assert sum(made.is_engine_earlier("image", 100) for _ in range(20)) == 10  # of 0.2 s each, for two front ends
    clock(1.1)
    assert [made.is_engine_earlier("image", 100) for _ in range(3)] == [False, True, True]
    clock(5)
    made.prepared("image", 2.0, 100)
    assert not made.is_engine_earlier("image", 100)
    clock(1)
    assert made.is_engine_earlier("video", 100)


def test_the_encoder_is_chosen_again(clock: Callable[[float], None], logged: pytest.LogCaptureFixture) -> None:
    """As soon as it is not later, but not within a second."""
    made = Choice(1)
    made.stored(2.0, 0.0)
    assert made.is_engine_earlier("image", 100)
    for _ in range(12):
        made.stored(0.02, 0.0)
    assert not made.is_engine_earlier("image", 100)
    assert len(logged.messages) == 1
    clock(1.0)
    assert not made.is_engine_earlier("image", 100)
    assert "the engine's tower" in logged.messages[0]
    assert "forecast 2.000 s for the encoder, 0.100 s for the engine" in logged.messages[0]
    assert "the encoder encodes" in logged.messages[1]


@pytest.fixture(scope="module")
def encoder(checkpoint: Path) -> Iterator[ServerProcess]:
    with serving(checkpoint, *SERVER_FLAGS) as server:
        yield server


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
