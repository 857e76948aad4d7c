"""`python bench/attention.py` reports each backend with its error, or why it is not there. No time is judged."""

from pathlib import Path

from benches import last_line


def test_attention_bench(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    document = last_line(
        "bench/attention.py", "--device", "cpu", "--tiny", "--calls", "2", "--repeats", "1", "--out", out
    )
    rows = document["attention"]
    assert {row["backend"] for row in rows} == {"sdpa"}
    assert {row["segments"] for row in rows} >= {"1 of 784", "4096, 1728, 1024, 836, 400"}
    assert all(0 < row["error"] < 0.01 < row["us"] for row in rows)
    assert {line.partition(":")[0] for line in document["skipped"]} >= {"triton", "hopper", "fa4"}
