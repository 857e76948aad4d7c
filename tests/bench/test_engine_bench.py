"""The parts of `make engine-bench` that need no engine; tests/engines/vllm/test_bench.py has the others."""

import asyncio
import base64
import io
import json
import threading
from dataclasses import replace

import numpy as np
import pytest
from bench.engine import answers, checkpoint, photos
from bench.engine.answers import Answer
from bench.engine.limits import Clock, OutOfTime, limited
from bench.engine.loads import Load, Size, drive
from bench.engine.options import options_of
from bench.engine.requests import Asked, image_tokens, patches_of, picture
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from client_models import described


def answer(start: float, end: float, *, first: float = 0.01, tokens: str = "abc", **moments: float) -> Answer:
    """Of a request whose second token comes 5 ms after the first."""
    arrivals = [start + first, start + first + 0.005]
    return Answer(start, end, arrivals, list(tokens.encode()), {name: start + at for name, at in moments.items()})


def test_loads_and_sizes() -> None:
    assert (Load.of("c8"), Load.of("p2.5")) == (Load(closed=True, amount=8), Load(closed=False, amount=2.5))
    assert [str(Load.of(text)) for text in ("c8", "p2.5", "p20")] == ["c8", "p2.5", "p20"]
    assert (Size.of("448x2"), str(Size.of("448"))) == (Size(448, 2), "448x1")
    for text in ("8", "c0", "x3", "p-1", "c2.5", "pinf", "pnan", "c"):
        with pytest.raises(ValueError, match="cN"):
            Load.of(text)
    for text in ("", "x2", "0x1", "448x0", "448x-1", "a"):
        with pytest.raises(ValueError, match="SIDExIMAGES"):
            Size.of(text)


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ("--routes local,remote", "'remote' is none of local"),
        ("--loads c1,8", "a load is cN"),
        ("--sizes 448by1", "a size is SIDE"),
        ("--requests 0", "--requests must be at least 1"),
        ("--from jpeg --routes local,text", "no route of text"),
        ("--from png", "'png'"),
        ("--sizes 450", "a multiple of 32"),
        ("--sizes 96", "from 128 on"),
        ("--language 9b", "'9b'"),
        ("--engine-args {", "is not JSON"),
        ("--engine-args [1]", "must be a JSON object"),
    ],
)
def test_options_that_are_wrong_are_named(words: str, fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options_of(None, words.split())
    assert fault in capsys.readouterr().err


@pytest.mark.parametrize(("load", "most"), [("c3", 3), ("c20", 10), ("p100000", 10)])
async def test_a_load_makes_each_call_once(load: str, most: int) -> None:
    """A closed loop has its number in flight, and arrivals wait for nobody."""
    flying: list[int] = []
    peak, full = 0, asyncio.Event()

    async def call(number: int) -> int:
        nonlocal peak
        flying.append(number)
        peak = max(peak, len(flying))
        if peak == most:
            full.set()
        await full.wait()
        flying.remove(number)
        return number

    assert await drive(Load.of(load), 10, call) == list(range(10))
    assert peak == most


def test_figures() -> None:
    row = answers.figures([answer(0, at, first=at / 1000) for at in range(1, 101)] + [Answer(error="x")], Load.of("p1"))
    assert (row["requests"], row["errors"]) == (101, 1)
    assert [row[f"ttft_p{share}_ms"] for share in (50, 90, 99)] == [50, 90, 99]
    assert (row["itl_p50_ms"], row["itl_p99_ms"]) == (5, 5)
    assert answers.figures([Answer(error="x")], Load.of("c1")) == {"requests": 1, "errors": 1}


def test_the_rate_is_without_the_edges_of_a_stream() -> None:
    """Two in flight, a second each, after a slow first pair and before a lone last one."""
    pairs = [answer(start, start + 1) for start in (5, 5, 6, 6, 7, 7)]
    stream = [answer(0, 5), answer(0, 5), *pairs, answer(8, 20)]
    assert answers.rate(stream, Load.of("c2")) == pytest.approx(2)
    assert answers.rate([answer(0, end) for end in (1, 2, 3, 5)], Load.of("p1")) == pytest.approx(0.75)
    assert answers.rate([answer(0, 0.5)], Load.of("c8")) == pytest.approx(2)


def test_the_timeline_has_medians_in_their_order() -> None:
    stream = [answer(at, at + 1, submitted=0.002, accepted=0.001, first=0.01) for at in (1, 2, 3)]
    stream[0].spans["server_encoded"] = 0.004
    row = answers.timeline([*stream, Answer(error="x", moments={"accepted": 9})])
    assert list(row.items()) == [("accepted", 1), ("submitted", 2), ("server_encoded", 4)]


def test_tokens_are_compared_by_request() -> None:
    local = [answer(0, 1, tokens=tokens) for tokens in ("abcd", "abcd", "abcd")]
    ours = [answer(0, 1, tokens=tokens) for tokens in ("abcd", "abxd", "xbcd")]
    assert answers.compared([*ours, Answer(error="x")], [*local, local[0]]) == {
        "compared": 3,
        "first_equal": 2,
        "all_equal": 1,
        "mean_equal_tokens": 2,
    }
    assert answers.compared([], [])["mean_equal_tokens"] is None


def test_patches_are_those_of_the_processor() -> None:
    model = replace(described(tiling=False), patch_size=16, merge_size=2)
    picture_ = picture(128, (0,))
    item = patches_of(picture_, model)
    processor = Qwen2VLImageProcessorPil(
        patch_size=16, merge_size=2, min_pixels=1, max_pixels=1 << 24, do_normalize=False, do_rescale=False
    )
    theirs = processor(picture_, return_tensors="np")
    assert theirs["image_grid_thw"].tolist() == [list(item.grid)]
    frames = theirs["pixel_values"].reshape(64, 3, 2, 256)
    assert isinstance(item.pixels, np.ndarray)
    for frame in (frames[:, :, 0], frames[:, :, 1]):
        np.testing.assert_array_equal(frame.reshape(item.pixels.shape), item.pixels)
    with pytest.raises(ValueError, match="multiples of 32"):
        patches_of(picture(144, (0,)), model)


def test_photographs_differ_in_bytes_alone() -> None:
    words = [checkpoint.FIRST_BYTE] * 6
    asked = Asked([*words, *image_tokens(1), *words], [picture(64, (0,))], [])
    first, second = (json.loads(photos._body(asked, name)) for name in ("a", "b"))
    files = []
    for body, name in ((first, "a-0"), (second, "b-0")):
        before, photo, after = body["messages"][0]["content"]
        assert (len(before["text"]), len(after["text"]), photo["uuid"]) == (6, 6, name)
        files.append(base64.b64decode(photo["image_url"]["url"].removeprefix("data:image/jpeg;base64,")))
    assert files[0] != files[1]
    pixels = [np.asarray(Image.open(io.BytesIO(each))) for each in files]
    assert (pixels[0] == pixels[1]).all()
    assert first["messages"][0]["content"][0] == second["messages"][0]["content"][0]


def test_a_run_ends_when_its_time_is_over() -> None:
    with pytest.raises(OutOfTime), limited(Clock(0.01), lambda: None):
        threading.Event().wait(60)
    with limited(Clock(60), lambda: None):
        pass
    assert not [
        each for each in threading.enumerate() if isinstance(each, threading.Timer) and not each.finished.is_set()
    ]
