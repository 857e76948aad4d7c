"""The parts of `make engine-bench` that need no engine; tests/engines/vllm/test_bench.py has the others."""

import asyncio
import threading
from pathlib import Path

import pytest
from bench.engine import answers
from bench.engine.answers import Answer
from bench.engine.limits import Clock, OutOfTime, limited
from bench.engine.loads import Load, Size, drive
from bench.engine.plots import plot


def answer(start: float, end: float, *, first: float = 0.01, tokens: str = "abc", **moments: float) -> Answer:
    """Of a request whose second token comes 5 ms after the first."""
    arrivals = [start + first, start + first + 0.005]
    return Answer(start, end, arrivals, list(tokens.encode()), {name: start + at for name, at in moments.items()})


def test_loads_and_sizes() -> None:
    assert (Load.of("c8"), Load.of("p2.5")) == (Load(closed=True, amount=8), Load(closed=False, amount=2.5))
    assert [str(Load.of(text)) for text in ("c8", "p2.5", "p20")] == ["c8", "p2.5", "p20"]
    assert (Size.of("448x2"), str(Size.of("448"))) == (Size(448, 2), "448x1")
    for text in ("8", "c0", "x3", "p-1"):
        with pytest.raises(ValueError, match="cN"):
            Load.of(text)


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


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    place = {"size": "448x1", "load": "c1"}
    streams = [place | {"way": way, "ttft_p50_ms": 20, "requests_per_s": 9} for way in ("local", "reference")]
    document = {"streams": [*streams, place | {"way": "inline", "errors": 3}], "device": "cpu", "engine": "vLLM"}
    document |= {"timeline": [place | {"way": "reference", "accepted": 3, "first_token": 20}], "date": "today"}
    plot(document, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_ends_when_its_time_is_over() -> None:
    with pytest.raises(OutOfTime), limited(Clock(0.01), lambda: None):
        threading.Event().wait(60)
    with limited(Clock(60), lambda: None):
        pass
    assert not [
        each for each in threading.enumerate() if isinstance(each, threading.Timer) and not each.finished.is_set()
    ]
