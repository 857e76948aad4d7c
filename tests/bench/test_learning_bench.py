"""`python bench/learning.py` reports changes with clients before, during and after them. No time is judged."""

from pathlib import Path

import pytest

from benches import last_line


@pytest.mark.matrix
def test_learning_bench(tmp_path: Path) -> None:
    flags = ("--tiny", "--device", "cpu", "--graphs", "simulated", "--max-budget-tokens", "128", "--images", "8")
    own = ("--clients", "2", "--seconds", "1", "--changes", "1", "--out", str(tmp_path / "out"))
    document = last_line("bench/learning.py", *flags, *own)
    assert [(row["clients"], row["captures"], row["when"], row["failed"]) for row in document["latency"]] == [
        (2, where, when, 0) for where in ("in turns", "whole") for when in ("before", "during", "after")
    ]
    assert {row["step"] for row in document["steps"]} >= {"capture", "keep"}
    for change in document["changes"]:
        assert change["finished"]
        assert change["engine_s"] < change["over_s"]
