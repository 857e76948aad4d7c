"""What the README shows, run as it is written."""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import skimage

from checkpoints import Checkpoints
from servers import ServerProcess, serving

ROOT = Path(__file__).parents[2]
TARGET = "localhost:50051"
PHOTO = Path(skimage.__file__).parent / "data" / "rocket.jpg"


@pytest.fixture(scope="module")
def server(checkpoints: Checkpoints) -> Iterator[ServerProcess]:
    with serving(checkpoints("qwen3_vl"), "--graphs", "simulated", "--max-budget-tokens", "1024") as running:
        yield running


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    return found


def test_the_client_in_ten_lines(server: ServerProcess) -> None:
    program = block("python")
    assert TARGET in program
    ran = subprocess.run(
        [sys.executable, "-c", program.replace(TARGET, server.target)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    shape, *rows = ran.stdout.splitlines()
    assert re.fullmatch(r"\(\d+, \d+\) (graph|eager)", shape)
    assert len(rows) == 3


def recipes() -> list[str]:
    """The commands of docs/client.md that call grpcurl."""
    text = (ROOT / "docs" / "client.md").read_text(encoding="utf-8")
    return [found for found in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) if found.startswith("grpcurl ")]


@pytest.mark.parametrize(("recipe", "tokens"), [(0, 260), (1, 1)], ids=["photograph", "pixels"])
def test_grpcurl_encodes(server: ServerProcess, recipe: int, tokens: int, tmp_path: Path) -> None:
    shutil.copy(PHOTO, tmp_path / "photo.jpg")
    script = recipes()[recipe]
    assert TARGET in script
    search = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    ran = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script.replace(TARGET, server.target)],
        cwd=tmp_path,
        env=os.environ | {"PATH": search},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    answer = json.loads(ran.stdout)
    assert answer["report"]["tokens"] == tokens
    rows, columns = map(int, answer["chunk"]["shape"])
    assert (rows, len(base64.b64decode(answer["chunk"]["data"]))) == (tokens, tokens * columns * 2)


def test_it_is_a_page() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_links_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for link in re.findall(r"\]\((?!http)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_make_serve_leaves_a_server_to_play_with() -> None:
    """Port 0, as others may hold the usual ones."""
    command = ["make", "serve", "FLAGS=--port 0 --metrics-port 0 --lame-duck-seconds 0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as make:
        assert make.stdout
        try:
            assert any(line.startswith("ready: qwen3_vl") for line in make.stdout)
        finally:
            make.terminate()
