"""The parts of `make engine-bench --setups` that need no engine; tests/engines/vllm/test_bench.py has the others."""

import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bench.engine import vllm_engine
from bench.engine.busy import Busy
from bench.engine.encoders import _free_ports
from bench.engine.equal_p99 import Point, Rate, compared, rate_within, turns
from bench.engine.loads import Load
from bench.engine.requests import Asked, patches_of, picture, renewed
from bench.engine.splits import Split, grouped, shares

from client_models import described

CURVE = [Point("c1", 10, 50), Point("c2", 20, 100), Point("c4", 24, 300)]


def splits(text: str) -> list[Split]:
    return [Split.of(each) for each in text.split(",")]


def test_a_split_has_its_encoders_on_the_last_devices() -> None:
    split = Split.of("3+1")
    assert (split.engines, split.encoders, split.devices, str(split)) == (3, 1, 4, "3+1")
    assert (list(split.encoder_devices), str(split.local), list(Split.of("4+0").encoder_devices)) == ([3], "4+0", [])


@pytest.mark.parametrize("text", ["", "3", "+1", "3+", "0+4", "3+-1", "3+1+1", "a+b"])
def test_splits_that_are_wrong(text: str) -> None:
    with pytest.raises(ValueError, match="3\\+1"):
        Split.of(text)


@pytest.mark.parametrize(
    ("text", "groups", "engines"),
    [
        ("4+0,3+1,2+2", [["2+2", "4+0 3+1"]], [4]),
        ("2+2,4+0,4+0,3+1", [["2+2", "4+0 3+1"]], [4]),
        ("2+0,1+0", [["2+0 1+0"]], [2]),
        ("1+1,2+0", [["2+0 1+1"]], [2]),
        ("1+1,2+0,2+1,1+2", [["2+0 1+1"], ["1+2", "2+1"]], [2, 2]),
        ("6+2,8+0", [["8+0 6+2"]], [8]),
    ],
)
def test_setups_of_as_many_devices_share_processes(text: str, groups: list[list[str]], engines: list[int]) -> None:
    found = grouped(splits(text))
    assert [[" ".join(map(str, stage)) for stage in group.stages] for group in found] == groups
    assert [group.engines for group in found] == engines
    for group in found:
        last = [split.encoder_devices for stage in group.stages for split in stage if split.encoders]
        assert all(group.encoder_devices[-len(each) :] == each for each in last)


@pytest.mark.parametrize(
    ("load", "engines", "loads", "requests"),
    [
        ("c8", 3, ["c3", "c3", "c2"], [36, 36, 24]),
        ("c2", 4, ["c1", "c1"], [48, 48]),
        ("c1", 1, ["c1"], [96]),
        ("p9", 3, ["p3", "p3", "p3"], [32, 32, 32]),
        ("p0.5", 2, ["p0.25", "p0.25"], [48, 48]),
    ],
)
def test_engines_share_a_load(load: str, engines: int, loads: list[str], requests: list[int]) -> None:
    parts = shares(Load.of(load), 96, engines)
    assert [str(part) for part, _ in parts] == loads
    assert [count for _, count in parts] == requests
    assert sum(part.amount for part, _ in parts) == Load.of(load).amount


@pytest.mark.parametrize(
    ("bound", "rate"),
    [
        (49.9, None),
        (50, Rate(10, at_least=False)),
        (75, Rate(15, at_least=False)),
        (100, Rate(20, at_least=False)),
        (200, Rate(22, at_least=False)),
        (300, Rate(24, at_least=True)),
        (900, Rate(24, at_least=True)),
    ],
)
def test_the_rate_within_a_bound_is_interpolated(bound: float, rate: Rate | None) -> None:
    assert rate_within(CURVE, bound) == rate


def test_a_curve_need_not_ascend() -> None:
    """A load whose p99 is lower again, and a load that answers less."""
    falling = [Point("c1", 10, 100), Point("c2", 20, 80), Point("c4", 16, 200)]
    assert rate_within(falling, 90) == Rate(pytest.approx(20), at_least=False)
    assert rate_within(falling, 79) is None
    assert rate_within(falling, 140) == Rate(20, at_least=False)
    assert rate_within([], 10) is None


def test_rates_at_equal_p99() -> None:
    """Within each p99 of either; the local engines' highest load has more p99 than the setup's."""
    ours = [Point("c1", 8, 60), Point("c2", 30, 100), Point("c4", 36, 250)]
    rows = compared(ours, CURVE)
    assert [row["ttft_p99_ms"] for row in rows] == [50, 60, 100, 250, 300]
    assert [row["local_requests_per_s"] for row in rows] == [10, 12, 20, 23, 24]
    assert [row["requests_per_s"] for row in rows] == [None, 8, 30, 36, 36]
    assert [row["ratio"] for row in rows] == [None, 0.667, 1.5, 1.565, 1.5]
    assert [row["at_least"] for row in rows] == [None, False, False, True, True]
    assert [row["local_at_least"] for row in rows] == [False, False, False, False, True]


def test_where_rates_turn() -> None:
    assert turns([("c1", None, 10), ("c2", 8, 12), ("c4", 30, 20), ("c8", 36, 24)]) == [
        {"from": "c1", "ratio": "below 1"},
        {"from": "c4", "ratio": "at least 1"},
    ]
    assert turns([("c1", 5, None), ("c2", 6, 6), ("c4", 6, 7), ("c8", 8, 7)]) == [
        {"from": "c1", "ratio": "at least 1"},
        {"from": "c4", "ratio": "below 1"},
        {"from": "c8", "ratio": "at least 1"},
    ]
    assert turns([]) == []


def test_renewed_requests_differ_in_pictures_and_patches_alike() -> None:
    model = replace(described(tiling=False), patch_size=16, merge_size=2)
    pictures = [picture(128, (0,)), picture(128, (1,))]
    asked = Asked([1, 2], pictures, [patches_of(each, model) for each in pictures])
    one, other = renewed(asked, "one"), renewed(asked, "other")
    for index in range(2):
        again = patches_of(one.pictures[index], model)
        np.testing.assert_array_equal(np.asarray(again.pixels), np.asarray(one.items[index].pixels))
        changed = (np.asarray(one.pictures[index]) != np.asarray(pictures[index])).any(axis=2)
        assert changed.any()
        assert not changed[16:].any()
        assert not changed[:, 16:].any()
        assert (np.asarray(one.items[index].pixels) != np.asarray(other.items[index].pixels)).any()
    assert renewed(Asked([1], pictures, []), "one").items == []


def test_busy_is_the_mean_within_the_stream() -> None:
    busy = Busy()
    for line, at in (("0, 10", 1), ("1, 90", 1), ("0, 50", 2), ("1, 70", 2), ("0, 100", 9), ("0, [N/A]", 2), ("?", 2)):
        busy.note(line, at)
    assert busy.between(1, 3, range(2)) == {"0": 0.3, "1": 0.8}
    assert busy.between(8, 9, range(2)) == {"0": 1.0}
    assert busy.between(1, 3, range(3)) == {"0": 0.3, "1": 0.8}


def test_nvidia_smi_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in that prints what it prints; the process ends with the block."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho \"$@\" > $0.words\nwhile :; do echo '2, 40'; echo '3, 60'; sleep 0.01; done\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    begin = time.monotonic()
    with Busy() as busy:
        while not (found := busy.between(begin, time.monotonic(), range(2))):
            time.sleep(0.01)
    assert found == {"0": 0.4, "1": 0.6}
    assert "--id=2,3" in (tmp_path / "nvidia-smi.words").read_text()
    assert busy._process is not None
    assert busy._process.poll() is not None


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine would share one with another, unnoticed."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert vllm_engine._rotated(1, None) == ["1", "0"]
    assert vllm_engine._rotated(1, "5,GPU-a3") == ["GPU-a3", "5"]
    with pytest.raises(ValueError, match="no GPU 2: 2 can be seen"):
        vllm_engine._rotated(2, None)


def test_consecutive_ports() -> None:
    first = _free_ports(3)
    assert first > 1024
    assert first + 3 < 65536
