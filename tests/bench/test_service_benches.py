"""The benchmarks of the service run and report every row of docs/performance/service.md. No time is judged."""

import json
from argparse import Namespace
from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import Any

import grpc
import pytest
from bench.client_processes import ClientProcess, bare_servers, cpu_seconds, loaded
from bench.commands import ClientFailed
from bench.echo import ANSWER
from bench.report import Report
from bench.service import Bench
from bench.setups import Setup, parser

from benches import last_line


def numbers(value: Any) -> Iterator[float]:
    """All numbers in a document."""
    if isinstance(value, dict):
        for each in value.values():
            yield from numbers(each)
    elif isinstance(value, list):
        for each in value:
            yield from numbers(each)
    elif isinstance(value, int | float):
        yield value


@pytest.mark.matrix
def test_wire_bench(tmp_path: Path) -> None:
    out = tmp_path / "wire.json"
    flags = ("--quick", "--seconds", "1", "--turns", "2", "--rpc-processes", "1")
    document = last_line("bench/wire.py", *flags, "--out", str(out))
    assert document == json.loads(out.read_text())
    assert all(isfinite(number) and number >= 0 for number in numbers(document["trips"] + document["cpu"]))
    assert [(row["down_mb"], row["in_flight"]) for row in document["trips"]] == [(1.61, 1), (1.61, 4)]
    for row in document["trips"]:
        assert (row["rpc_processes"], row["errors"]) == (1, 0)
        assert min(row["bare_ms"], row["service_ms"], row["client_ms"]) > 0
        assert min(row["service_over_bare"], row["client_over_bare"]) > 0
    assert [row["path"] for row in document["cpu"]] == ["bare", "service", "client"] * len(document["trips"])
    (row,) = document["beside"]
    assert row["errors"] == {}
    assert row["beside_p99_ms"] >= row["beside_p50_ms"] > 0 < row["alone_p50_ms"]


PREPARED = ("picture:112:2", "float32:112:2", "jpeg:1080p:2", "clip:112:2")
"""Loads of files and pictures, which the server prepares, and what they are compared with."""


@pytest.mark.matrix
def test_service_bench(tmp_path: Path) -> None:
    out = tmp_path / "service.json"
    flags = ("--tiny", "--devices", "cpu", "--loads", "112:1", "112:4", *PREPARED, "--seconds", "2", "--clients", "2")
    tiny = ("--flags", "--graphs simulated --budgets 16,64", "--delivery", "stream", "nixl")
    kinds = ("--drivers", "client", "--bare", "1", "--decode", "cpu")
    document = last_line("bench/service.py", *flags, *tiny, *kinds, "--out", str(out))
    assert document == json.loads(out.read_text())
    loads = [("uint8", "112", 1), ("uint8", "112", 4), *((*tuple(load.split(":")[:2]), 2) for load in PREPARED)]
    assert [(row["pixels"], row["size"], row["in_flight"]) for row in document["bare"]] == loads
    streamed = [row for row in document["rows"] if row["delivery"] == "stream"]
    assert [(row["pixels"], row["size"], row["in_flight"]) for row in streamed] == loads
    delivered = [row for row in document["rows"] if row["delivery"] == "nixl"]
    assert len(delivered) == len(loads)
    for row in document["bare"] + document["rows"]:
        assert row["errors"] == {}
        assert row["clips_per_second" if row["pixels"] == "clip" else "images_per_second"] > 0
        assert row["p99_ms"] >= row["p50_ms"] > 0
        assert min(row["server_cpu_s_per_gb"], row["client_cpu_s_per_gb"]) >= 0
    for row in document["rows"]:
        assert row["of_bare"] > 0
        assert 0 <= row["busy"] < 1.2
        assert (row["decode"], row["decoded_on_device"]) == ("cpu", 0)


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ("--loads 224", "'224' is not [PIXELS:]SIZE:IN_FLIGHT"),
        ("--loads 224:0", "'224:0' is not [PIXELS:]SIZE:IN_FLIGHT"),
        ("--loads 224:-1", "'224:-1' is not [PIXELS:]SIZE:IN_FLIGHT"),
        ("--loads gif:224:8", "'gif:224:8' is not [PIXELS:]SIZE:IN_FLIGHT"),
        ("--clients 0", "--clients: must be a whole number, at least 1"),
        ("--rpc-processes 4 -1", "--rpc-processes"),
        ("--bare 0", "--bare: must be"),
    ],
)
def test_service_bench_names_the_wrong_option(words: str, fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser(None).parse_args(words.split())
    assert fault in capsys.readouterr().err


def test_service_bench_lists_what_there_was_no_time_for(tmp_path: Path) -> None:
    report = Report("service", None, {})
    options = Namespace(flags="", delivery=["stream"], minutes=0)
    Bench(report, options, tmp_path).run(Setup("Qwen3-VL-8B", "cpu", 1))
    assert report.document()["skipped"] == ["Qwen3-VL-8B on cpu, RPC processes: 1, --decode auto: no time"]


def test_bare_servers_answer_with_the_sizes_that_a_call_asks_for() -> None:
    with bare_servers(2) as (target, pids):
        assert len(pids) == 2
        with grpc.insecure_channel(target, [("grpc.max_receive_message_length", -1)]) as channel:
            call = channel.unary_stream("/any/method", None, None)
            assert [len(each) for each in call(b"x", metadata=((ANSWER, "7,8388608,3"),))] == [7, 8388608, 3]
        assert cpu_seconds(pids) > 0
    assert cpu_seconds(pids) == 0


def test_a_client_process_that_fails_says_why() -> None:
    with ClientProcess("client", target="127.0.0.1:1") as client, pytest.raises(ClientFailed, match="Unavailable"):
        client.ask(prepare={"size": "64"})
    with ClientProcess("no such kind", target="") as client, pytest.raises(ClientFailed, match="exited"):
        loaded([client], 1, 0.1, [], ramp=0.1)
