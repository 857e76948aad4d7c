"""`make engine-bench` with a stand-in for vLLM, and its statistics; tests/engines/vllm/test_bench.py has vLLM's own."""

import asyncio
import io
import json
import re
import sys
import time
from base64 import b64decode
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench.engine import answers, client_process, document, goodput, photos, setups
from bench.engine.answers import Answer
from bench.engine.goodput import Point
from bench.engine.loads import Load, Size, arrivals
from bench.engine.options import options_of
from bench.engine.photos import Prompts
from bench.engine.serving import Settings
from bench.engine.setups import Setup
from bench.engine.sweep import AXES, helps, swept
from PIL import Image

from benches import ROOT, last_line
from routers import engine

STAND_IN = ROOT / "tests" / "support" / "engine.py"
COMMON = ["--tiny", "--text", "8", "--tokens", "5", "--sizes", "224x1", "--clients", "1", "--start-seconds", "1"]
Run = Callable[..., dict[str, Any]]


def answer(start: float, end: float, *, first: float = 0.01, gap: float = 0.005, number: int = 0) -> Answer:
    """Of a request with an image, whose second token comes `gap` after the first."""
    return Answer(number, 1, start, end, [start + first, start + first + gap], 2)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """The benchmark with these flags, in its own process; its document."""

    def bench(*flags: str, code: int = 0, command: str = f"{sys.executable} {STAND_IN} {{port}}") -> dict[str, Any]:
        words = ["-m", "bench.engine", *COMMON, "--model", str(tmp_path), "--engine", command, *flags]
        return last_line(*words, code=code)

    return bench


def test_a_run_is_continued_where_it_stopped(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    flags = ("--requests", "120", "--out", str(out))
    first = run(*flags, "--order", "local", "--loads", "c4")
    assert [(row["setup"], row["load"]) for row in first["streams"]] == [("local", "c4")]
    second = run(*flags, "--order", "local,again", "--loads", "c4")
    assert [(row["start"], row["setup"]) for row in second["streams"]] == [(0, "local"), (1, "again")]
    assert second["streams"][0] == first["streams"][0]
    assert second == json.loads(out.read_text())
    for row in second["streams"]:
        assert (row["requests"], row["errors"], "no_rate" in row) == (120, 0, False)
        assert row["requests_per_s"] > 0 < row["cpu_ms"] == row["engine_cpu_ms"]
        low, high = row["ttft_p99_interval"]
        assert 0 < low <= row["ttft_p99_ms"] <= 1.2 * high
    (control,) = second["against_local"]
    rates = [row["requests_per_s"] for row in second["streams"]]
    assert control["requests_per_s"] == pytest.approx(rates[1] / rates[0], abs=1e-3)
    assert run("--merge", str(out), str(out))["streams"] == second["streams"]
    other = run(*flags, "--tokens", "4", code=1)
    assert "tokens is 5 there and 4 here" in other["fault"]
    assert json.loads(out.read_text()) == second


@pytest.mark.matrix
def test_a_sweep_is_over_when_its_time_is(run: Run, tmp_path: Path) -> None:
    flags = ("--sweep", "--probe", "c4", "--probe-requests", "110", "--out", str(tmp_path / "sweep.json"))
    found = run(*flags, "--time-limit", "53", "--start-seconds", "30")
    assert [row["tried"] for row in found["sweep"]][:1] == ["defaults"]
    assert found["skipped"] == ["the rest of the sweep: no time; run it again with the same --out"]
    assert "local" not in found
    assert found["local_so_far"].keys() == {"flags", "environment"}


@pytest.mark.matrix
def test_a_run_ends_when_its_time_is_over(run: Run) -> None:
    found = run("--order", "local", "--loads", "c4,p1", "--requests", "120", "--time-limit", "100")
    assert [row["load"] for row in found["streams"]] == ["c4"]
    assert [each.rpartition(": ")[2] for each in found["skipped"]] == ["no time"]
    asleep = f"{sys.executable} -c __import__('time').sleep(99) {{port}}"
    ended = run("--order", "local", "--time-limit", "9", "--start-seconds", "-999", code=1, command=asleep)
    assert re.search("not ready in time|time limit is over", ended["error"])


def test_what_does_not_start_or_dies_is_said(run: Run) -> None:
    found = run("--order", "local", code=1, command=f"{sys.executable} -c raise(SystemExit('no-device')) {{port}}")
    assert "the engine ended with 1" in found["error"]
    assert "no-device" in found["error"]


@pytest.mark.parametrize(
    ("model", "fault"),
    [
        ("bench", ""),
        ("status-429", "HTTP 429: .*the engine says 429.*"),
        ("broken-stream", "(ValueError|IncompleteReadError): .*"),
        ("silent", "not over after 0.5 s"),
    ],
)
async def test_a_request(model: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_process, "SECONDS", 0.5 if model == "silent" else 60)
    body = Prompts("64x1", 0, 8, 5).body(0).replace(b'"bench"', f'"{model}"'.encode())
    with engine() as stand_in:
        found = await client_process.requested(stand_in.url, body, "name-3", 5)
        (seen,) = stand_in.requests()
    assert seen["headers"]["x-request-id"] == "name-3"
    assert re.fullmatch(fault, found.error), found.error
    if not fault:
        assert (found.tokens, len(found.arrivals)) == (5, 5)
        assert found.start < found.arrivals[0] <= found.arrivals[-1] <= found.end
    gone = await client_process.requested(stand_in.url, body, "name-3", 5)
    assert gone.error.startswith("ConnectionRefusedError")


async def test_a_stream_sends_each_request_once_and_on_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, str]] = []

    async def requested(url: str, _body: bytes, name: str, _tokens: int) -> Answer:
        sent.append((url, name))
        begun = time.monotonic()
        await asyncio.sleep(0.01)
        return Answer(start=begun, end=time.monotonic())

    monkeypatch.setattr(client_process, "requested", requested)
    prompts = Prompts("mix", 0, 8, 5)
    for load in (Load.of("c2"), Load.of("p200")):
        sent.clear()
        parts = [client_process.Stream(prompts, 9, part, 2) for part in range(2)]
        at = time.monotonic() + 0.05
        both = await asyncio.gather(*(part.run(["a", "b"], load, 1, at, "s") for part in parts))
        found = {each.number: each for part in both for each in part}
        assert sorted(found) == list(range(9))
        assert sorted(sent) == sorted(("ab"[number % 2], f"s-{number}") for number in range(9))
        if not load.closed:
            due = [at + each for each in arrivals(200, 9, 0)]
            assert [found[number].start for number in range(9)] == pytest.approx(due, abs=1e-6)
            assert all(found[number].end >= due[number] + 0.01 for number in range(9))


def test_photographs_have_their_size_and_bits() -> None:
    for shape in ((224, 224), (448, 320)):
        for file in (photos.photograph(shape, variant) for variant in range(3)):
            assert Image.open(io.BytesIO(file)).size == shape
            assert 0.3 < 8 * len(file) / shape[0] / shape[1] <= 2.5


def test_files_of_requests_differ_unless_they_repeat() -> None:
    def files(prompts: Prompts, count: int) -> list[bytes]:
        bodies = [json.loads(prompts.body(number)) for number in range(count)]
        parts = [part for body in bodies for part in body["messages"][0]["content"] if part["type"] == "image_url"]
        return [b64decode(part["image_url"]["url"].partition(",")[2]) for part in parts]

    fresh = files(Prompts("64x2", 1, 8, 5), 40)
    assert len(set(fresh)) == len(fresh) == 80
    assert not set(fresh) & set(files(Prompts("64x2", 2, 8, 5), 40))
    repeating = files(Prompts("64x1", 1, 8, 5, repeats=0.5), 200)
    assert 0.35 < len(set(repeating)) / 200 < 0.65
    plain = photos.photograph((64, 64), 1)
    one, other = (np.asarray(Image.open(io.BytesIO(file))) for file in (plain, photos.commented(plain, b"x" * 40)))
    assert (one == other).all()
    counts = [Prompts("mix", 0, 8, 5).images(number) for number in range(400)]
    assert set(counts) == {0, 1}
    assert 160 < sum(counts) < 240


def test_rate_and_times_are_of_one_window() -> None:
    """Two in flight, a second each, after a slow first pair and before a lone last one."""
    slow = [answer(0, 5, first=4), answer(0, 5, first=4)]
    even = [answer(5 + at, 6 + at) for at in range(60) for _ in range(2)]
    stream = [*slow, *even, answer(65, 90, first=20)]
    load = Load.of("c2")
    assert answers.window(stream, load) == (5, 65)
    row = answers.figures(stream, load)
    assert (row["requests_per_s"], row["window_s"], row["inner"]) == (2, 60, 121)
    assert row["ttft_p50_ms"] == 10
    assert answers.figures(stream[:90], load)["requests_per_s"] is None
    assert answers.figures(stream[:90], load)["no_rate"].startswith("86 requests")


def test_arrivals_count_without_the_first_twentieth() -> None:
    stream = [answer(at, at + 1, first=(9 if at < 10 else 0.01)) for at in range(200)]
    assert answers.window(stream, Load.of("p1")) == (10, 199)
    row = answers.figures(stream, Load.of("p1"))
    assert (row["ttft_p99_ms"], row["inner"]) == (10, 190)
    assert row["requests_per_s"] == pytest.approx(1, abs=0.01)


def test_failed_requests_count_as_errors_alone() -> None:
    stream = [answer(at / 10, at / 10 + 0.5) for at in range(150)]
    failed = [replace(each, error="x", arrivals=[]) for each in stream[::3]]
    row = answers.figures([*failed, *stream], Load.of("p10"))
    assert (row["requests"], row["errors"]) == (200, 50)
    assert answers.figures(failed, Load.of("p10"))["errors"] == 50


def test_a_bootstrap_interval_holds_the_quantile_and_narrows() -> None:
    rng = np.random.default_rng(3)
    wide = answers.bootstrap([[each] for each in rng.exponential(100, 200)], 0.99)
    narrow = answers.bootstrap([[each] for each in rng.exponential(100, 20_000)], 0.99)
    truth = 100 * np.log(100)
    assert narrow[0] < truth < narrow[1]
    assert narrow[1] - narrow[0] < (wide[1] - wide[0]) / 3
    assert answers.bootstrap([[7.0]] * 100, 0.99) == [7, 7]


def test_a_bootstrap_draws_whole_requests() -> None:
    """One request in a hundred has all of the slow values: as often as not it is drawn twice, or never."""
    groups = [[1.0] * 100] * 99 + [[50.0] * 100]
    assert answers.bootstrap(groups, 0.985) == [1, 50]
    shuffled = np.random.default_rng(0).permutation(np.concatenate(groups)).reshape(100, 100).tolist()
    assert answers.bootstrap(shuffled, 0.985) == [1, 1]


def test_spans_are_of_each_request() -> None:
    """Medians of moments, subtracted, would give 0 between `queued` and `fetched`."""
    stream = [answer(at, at + 1, first=0.1, number=at) for at in range(3)]
    moments = {}
    for number, (queued, fetched) in enumerate(((0.01, 0.03), (0.03, 0.04), (0.05, 0.09))):
        moments[number] = {"accepted": number + 0.005, "queued": number + queued, "fetched": number + fetched}
    row = answers.spans(stream, moments, Load.of("p1"))
    assert (row["of"], row["queued_fetched_p50_ms"], row["sent_accepted_p50_ms"]) == (3, 20, 5)
    assert answers.spans(stream, {}, Load.of("p1")) == {}


def test_moments_belong_to_the_stream_and_the_last_of_their_images(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [{"content": "a", "fetched": 3.0}, {"content": "b", "fetched": 4.0}]
    for name, of in (("p5-7", ["a", "b"]), ("p50-8", ["a"]), ("p5-9", ["gone"]), ("p5-10", [])):
        lines.append({"request": f"chatcmpl-mix-{name}-0a1b2c3d", "queued": 2.0, "accepted": 1.0, "of": of})
    path = tmp_path / "moments"
    path.write_text("\n".join(map(json.dumps, lines)))
    assert Setup("beside", moments=path).reached("mix-p5") == {7: {"accepted": 1, "queued": 2, "fetched": 4}}


def test_goodput_is_interpolated_where_the_curve_first_leaves_the_bounds() -> None:
    curve = [Point(20, 300, 30), Point(10, 100, 20), Point(30, 400, 60), Point(40, 150, 20)]
    assert goodput.goodput(curve, 200, 50) == (15, "")
    assert goodput.goodput(curve, 200, 22) == (12, "")
    assert goodput.goodput(curve, 500, 100) == (40, "at least")
    assert goodput.goodput(curve, 90, 50) == (None, "below 10")
    assert goodput.goodput([], 200, 50) == (None, "not measured")


def stream_row(setup: str, load: str, ttft: float, itl: float = 20, **other: Any) -> dict[str, Any]:
    place = {"sitting": "a", "start": 0, "setup": setup, "size": "mix", "load": load, "errors": 0}
    figures = {"ttft_p50_ms": ttft / 2, "ttft_p99_ms": ttft, "itl_p99_ms": itl, "requests_per_s": 9, "cpu_ms": 10}
    return place | figures | other


def test_the_grid_has_ratios_where_both_rates_are_known() -> None:
    rows = [stream_row("local", "p10", 100), stream_row("local", "p20", 300), stream_row("local", "c8", 9000)]
    rows += [stream_row("beside", "p10", 100), stream_row("beside", "p20", 200), stream_row("beside", "p30", 400)]
    found = {(row["ttft_p99_ms"], row["itl_p99_ms"]): row for row in goodput.grid(rows)}
    assert len(found) == 9
    assert (found[200, 50]["local"], found[200, 50]["beside"]) == (15, 20)
    assert found[200, 50]["beside_ratio"] == pytest.approx(20 / 15, abs=1e-3)
    assert found[500, 50]["local"] == "at least 20.0"
    assert "beside_ratio" not in found[500, 50]


def test_streams_are_compared_within_a_sitting() -> None:
    rows = [stream_row("local", "p10", 100), stream_row("beside", "p10", 80), stream_row("again", "p10", 110)]
    rows += [stream_row("beside", "p10", 50, sitting="b"), stream_row("beside", "p20", 50, errors=1)]
    rows += [stream_row("local", "p20", 100)]
    found = document.against_local(rows)
    assert [row.get("ttft_p99_ms") for row in found] == [0.8, 1.1, None, None]
    assert [row.get("not_compared") for row in found][2:] == ["no local in this sitting", "1 and 0 requests failed"]


def test_documents_of_sittings_are_merged(tmp_path: Path) -> None:
    def written(name: str, rows: list[dict[str, Any]], **settings: Any) -> Path:
        path = tmp_path / name
        path.write_text(json.dumps({"bench": "engine", "settings": settings, "streams": rows}))
        return path

    first = written("a", [stream_row("local", "p10", 100), stream_row("beside", "p10", 80)], tokens=5)
    second = written("b", [stream_row("local", "p10", 104, sitting="b"), stream_row("local", "p10", 100)], tokens=5)
    head, found = document.merged([first, second])
    assert head == {"merged": ["a", "b"], "settings": {"tokens": 5}}
    tables = document.tables(found["streams"])
    assert "".join(f"{row['sitting']}{row['setup'][0]}" for row in found["streams"]) == "alabbl"
    assert [row["ttft_p99_ms"] for row in tables["sittings"]] == [1.04]
    assert [row["ttft_p99_ms"] for row in tables["against_local"]] == [0.8]
    with pytest.raises(document.Unlike, match="tokens is 6 there and 5 here"):
        document.merged([first, written("c", [], tokens=6)])
    (tmp_path / "d").write_text("{")
    with pytest.raises(document.Unlike, match="cannot be read"):
        document.read(tmp_path / "d", {})
    (tmp_path / "e").write_text("{}")
    with pytest.raises(document.Unlike, match="is not a document"):
        document.merged([tmp_path / "e"])


def test_a_sweep_keeps_what_helps_and_goes_on_from_its_rows() -> None:
    """Two API servers help, four do not; encoder graphs make the engine fail; a smaller batch shortens TTFT."""
    noted: list[dict[str, Any]] = []
    probed: list[str] = []

    def probe(settings: Settings) -> dict[str, Any]:
        probed.append(str(settings))
        if "--compilation-config" in settings.flags:
            return {"error": "out of memory"}
        servers = settings.flags.get("--api-server-count")
        rate = {None: 10.0, "2": 12.0, "4": 12.1}[servers]
        return {
            "errors": 0,
            "requests_per_s": rate,
            "ttft_p50_ms": 80 if "--max-num-batched-tokens" in settings.flags else 100,
        }

    best, is_over = swept(probe, [], lambda row, _: noted.append(row), lambda: len(probed) < 4)
    assert (str(best), is_over) == ("--api-server-count 2", False)
    best, is_over = swept(probe, noted, lambda row, _: noted.append(row), lambda: True)
    assert (str(best), is_over) == ("--api-server-count 2 --max-num-batched-tokens 4096", True)
    assert len(probed) == len(set(probed)) == len(noted) < 1 + sum(map(len, AXES.values()))
    with pytest.raises(RuntimeError, match="does not start"):
        swept(lambda _: {"error": "x"}, [], lambda row, _: noted.append(row), lambda: True)


def test_a_probe_with_errors_never_helps() -> None:
    best = {"errors": 0, "requests_per_s": 10.0, "ttft_p50_ms": 100.0}
    assert helps(best | {"requests_per_s": 10.3}, best)
    assert helps(best | {"ttft_p50_ms": 94.0}, best)
    assert not helps(best | {"ttft_p50_ms": 50.0, "requests_per_s": 9.9}, best)
    assert not helps(best | {"requests_per_s": 20.0, "errors": 1}, best)


def test_loads_and_sizes() -> None:
    assert (Load.of("c8"), Load.of("p2.5")) == (Load(closed=True, amount=8), Load(closed=False, amount=2.5))
    assert (Size.of("448x2"), str(Size.of("448"))) == (Size(448, 2), "448x1")
    for text in ("8", "c0", "x3", "p-1", "c2.5", "pinf", "pnan", "c"):
        with pytest.raises(ValueError, match="cN"):
            Load.of(text)
    for text in ("", "x2", "0x1", "448x0", "448x-1", "a"):
        with pytest.raises(ValueError, match="SIDExIMAGES"):
            Size.of(text)
    due = arrivals(50, 2000, 1)
    assert due[-1] == pytest.approx(40, rel=0.15)


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ("--order local,remote", "'remote' is none of local"),
        ("--loads c1,8", "a load is cN"),
        ("--requests 0", "--requests must be at least 1"),
        ("--setup 3@1", "--setup is N@N"),
        ("--local {", "{: Expecting"),
        ('--beside {"flags":[1]}', "each an object with texts"),
    ],
)
def test_options_that_are_wrong_are_named(words: str, fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options_of(None, words.split())
    assert fault in capsys.readouterr().err


def test_the_settings_of_a_sweep_are_given_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sweep.json"
    best = Settings({"--api-server-count": "4"}, {"OMP_NUM_THREADS": "4"})
    path.write_text(json.dumps({"bench": "engine", "local": best.row()}))
    assert options_of(None, ["--local", str(path)]).local == best
    path.write_text(json.dumps({"bench": "engine", "local_so_far": best.row()}))
    with pytest.raises(SystemExit):
        options_of(None, ["--local", str(path)])
    assert "no finished sweep" in capsys.readouterr().err


def test_what_the_encoder_holds_is_taken_from_the_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """8 GiB, and 1 GiB for NIXL, of a device of 72: an eighth less."""
    used = iter((1024, 1024 + 8192))
    monkeypatch.setattr(setups, "cards", lambda: [{"used_mib": next(used), "total_mib": 73728}])
    with engine() as stand_in:
        monkeypatch.setattr(setups, "encoder", lambda *_, **__: nullcontext(stand_in))
        monkeypatch.setattr(type(stand_in), "wait_for", lambda *_: None)
        monkeypatch.setattr(setups, "_router", lambda *_: nullcontext(stand_in))
        words = ["--tiny", "--model", str(tmp_path), "--engine", f"{sys.executable} {STAND_IN} {{port}}"]
        options, starting = options_of(None, words), []
        given = setups.serving.engine
        monkeypatch.setattr(setups.serving, "engine", lambda *each: starting.append(each[2]) or given(*each))
        best, end = Settings({"--api-server-count": "2"}), time.monotonic() + 60
        with setups.started("beside", options, best, [], end) as setup:
            assert setup.described["encoder_mib"] == [8192]
    (found,) = starting
    assert found.flags["--gpu-memory-utilization"] == "0.7750"
    assert found.flags["--api-server-count"] == "2"
    assert json.loads(found.flags["--ec-transfer-config"])["ec_connector_extra_config"]["target"] == stand_in.target
