"""The file that a restart begins with: written whole, and ignored with a reason where it cannot be used."""

import json
import logging
import os
from multiprocessing import get_context
from pathlib import Path

import pytest

from vitwire_server.fitting.learned import Learned, StateFile

LEARNED = Learned((20, 64, 256), {20: 1.5, 200: 3.25})


@pytest.fixture
def file(tmp_path: Path) -> StateFile:
    return StateFile.in_folder(tmp_path / "made" / "later", "0123456789abcdef0123", "NVIDIA H200", 256)


def test_what_is_written_is_read_back(file: StateFile, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert file.read() is None
    assert not caplog.messages, "a first start is no news"
    file.write(LEARNED)
    assert file.read() == LEARNED
    assert file.path.name == "vitwire-ladder-0123456789abcdef-nvidia-h200-256.json"
    assert [path.name for path in file.path.parent.iterdir()] == [file.path.name]
    assert f"beginning with the 3 budgets of {file.path}" in caplog.text


def changed(**values: object) -> str:
    header = {"format": 1, "weights": "0123456789abcdef0123", "device": "NVIDIA H200", "largest": 256}
    return json.dumps(header | {"budgets": [20, 256], "loads": {"20": 1.0}} | values)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "Input data was truncated"),
        ('{"format": 1', "Input data was truncated"),
        (b"\xff\xfe\x00", "malformed"),
        ("[]", "Expected `object`, got `array`"),
        ("{}", "missing required field `format`"),
        (changed(format=2), "format is 2, this server has 1"),
        (changed(weights="fedcba"), "weights is 'fedcba', this server has '0123456789abcdef0123'"),
        (changed(device="cpu"), "device is 'cpu'"),
        (changed(largest=512), "largest is 512"),
        (changed(budgets=[20]), "budgets must be"),
        (changed(budgets=[]), "budgets must be"),
        (changed(budgets=[0, 256]), "budgets must be"),
        (changed(budgets=[20, 256, 512]), "budgets must be"),
        (changed(budgets=list(range(1, 400))), "budgets must be"),
        (changed(budgets="all"), "Expected `array`, got `str` - at `$.budgets`"),
        (changed(loads={"20": -1.0}), "loads must be"),
        (changed(loads={"20": float("nan")}), "malformed"),
        (changed(loads={"20": 1e300}), "loads must be"),
        (changed(loads={"9999": 1.0}), "loads must be"),
        (changed(loads=[1]), "Expected `object`, got `array` - at `$.loads`"),
        (changed(loads={"20": None}), "Expected `float`, got `null`"),
        ("[" * 100_000, ""),
        (" " * (2 << 20), "the file is larger than 1048576 bytes"),
    ],
)
def test_a_file_that_cannot_be_used_is_ignored_and_replaced(
    file: StateFile, content: str | bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    file.path.parent.mkdir(parents=True)
    file.path.write_bytes(content.encode() if isinstance(content, str) else content)
    assert file.read() is None
    (message,) = caplog.messages
    assert message.startswith(f"{file.path} is ignored, and replaced when a ladder is learned: ")
    assert reason in message
    file.write(LEARNED)
    assert file.read() == LEARNED


def test_a_folder_that_cannot_be_used_is_a_log_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    file = StateFile.in_folder(tmp_path / "file", "01", "cpu", 256)
    file.write(LEARNED)
    assert file.read() is None
    assert "the learned ladder is not kept over a restart" in caplog.text
    assert "replaced when" not in caplog.text, "nothing is there to be replaced"


def test_a_write_that_fails_leaves_the_old_file_and_no_other(
    file: StateFile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file.write(LEARNED)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    file.write(Learned((256,), {}))
    assert "No space left on device" in caplog.text
    assert file.read() == LEARNED
    assert len(list(file.path.parent.iterdir())) == 1


def write_many(file: StateFile, first: int) -> None:
    for size in range(first, first + 30):
        file.write(Learned((size, 256), {size: 1.0}))


def test_processes_that_share_the_file_always_read_a_whole_one(
    file: StateFile, caplog: pytest.LogCaptureFixture
) -> None:
    file.write(LEARNED)
    writers = [get_context("fork").Process(target=write_many, args=(file, first)) for first in (1, 31)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        learned = file.read()
        assert learned
        assert len(learned.sizes) - 1 == len(learned.loads) or learned == LEARNED
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert "is ignored" not in caplog.text
    assert len(list(file.path.parent.iterdir())) == 1
