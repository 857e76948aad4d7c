"""Demo checkpoints: the same arguments write the same bytes, whatever was drawn or written before."""

import os
import stat
from pathlib import Path

import pytest
import torch

from servers import finished
from vitwire_server.demo.checkpoint import write_demo_checkpoint


@pytest.mark.parametrize(("umask", "mode"), [("022", 0o644), ("077", 0o600)])
def test_files_have_the_mode_that_the_umask_gives(umask: str, mode: int, tmp_path: Path) -> None:
    """Another user reads them in a container, if the umask lets it."""
    before = os.umask(int(umask, 8))
    try:
        write_demo_checkpoint("qwen3_vl", tmp_path)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {mode}


def test_the_command_says_where_it_wrote(tmp_path: Path) -> None:
    done = finished("demo-checkpoint", "--model-type", "qwen3_vl", "--out", tmp_path / "new")
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/new\n"), done.stderr
    assert (tmp_path / "new" / "config.json").exists()


def written(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("model_type", "other"),
    [("paddleocr_vl", "qwen3_5"), ("qwen3_5", "qwen2_vl"), ("siglip2", "llava-pixtral"), ("deepseek_ocr2", "gemma3")],
)
def test_the_same_arguments_write_the_same_bytes(model_type: str, other: str, tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    write_demo_checkpoint(model_type, tmp_path / "first")
    assert torch.equal(torch.random.get_rng_state(), before), "what others draw is not touched"
    torch.manual_seed(5)
    write_demo_checkpoint(other, tmp_path / "other")
    write_demo_checkpoint(model_type, tmp_path / "second")
    assert written(tmp_path / "first") == written(tmp_path / "second")
    write_demo_checkpoint(model_type, tmp_path / "third", seed=1)
    assert written(tmp_path / "third").keys() == written(tmp_path / "first").keys()
    assert written(tmp_path / "third") != written(tmp_path / "first")
