"""Two releases side by side: the last one's client with this server, and this client with the last one's server."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from checkpoints import Checkpoints
from reference import TOLERANCE, error
from servers import serving
from vitwire import Client, Item, VitwireError

ROOT = Path(__file__).parents[2]
FIRST = "1b641acf"
"""Stands for the last release until there is a tag: older servers need packages that this one removed."""
PROGRAM = """
import json, sys
import numpy as np
import vitwire
target, out = sys.argv[1:]
photo = (np.arange(120 * 160 * 3) % 251).astype(np.uint8).reshape(120, 160, 3)
clip = np.stack([photo, photo[::-1], photo, photo[:, ::-1]])
with vitwire.Client(target) as client:
    rows = [*client.encode_images([photo]), *client.encode_clips([clip])]
    model = client.model()
    width = 3 * model.temporal_patch_size * model.patch_size**2
    pixels = np.linspace(-1, 1, 64 * width, dtype=np.float32).reshape(64, width)
    items = [vitwire.Item(pixels, (1, 8, 8)), vitwire.Item(pixels[:16], (1, 4, 4))]
    rows += [dict(client.iter_encode(items))[index] for index in range(len(items))]
    np.savez(out, *(each.numpy() for each in rows))
    print(json.dumps({"path": vitwire.__file__, "health": str(client.health()), "model_type": model.model_type}))
"""

pytestmark = pytest.mark.matrix


def git(*words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=False)


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources of the last tag before this commit; of an early commit where the history has no tag."""
    tag = git("describe", "--tags", "--abbrev=0", "--match", "v*", "HEAD^").stdout.decode().strip()
    archive = git("archive", tag or FIRST, "client", "server", "tests/support")
    if archive.returncode:
        pytest.skip(f"neither a tag nor {FIRST} is in this clone: git fetch --unshallow --tags")
    folder = tmp_path_factory.mktemp("release")
    subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
    return folder


def paths(root: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": f"{root / 'client'}:{root / 'server'}"}


def encoded(root: Path, target: str, out: Path) -> list[np.ndarray]:
    """An image and a clip, encoded by the client of a checkout."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, target, out], env=paths(root), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert Path(answer["path"]).is_relative_to(root)
    assert (answer["health"], answer["model_type"]) == ("SERVING", "qwen3_vl")
    with np.load(out) as rows:
        return [rows[name] for name in rows.files]


def test_the_last_client_with_this_server_and_the_reverse(
    checkpoints: Checkpoints, previous: Path, tmp_path: Path
) -> None:
    flags = ("--dtype", "float32", "--graphs", "simulated", "--max-budget-tokens", "1024")
    model = checkpoints("qwen3_vl")
    old_server = ("env", f"PYTHONPATH={previous / 'client'}:{previous / 'server'}")
    with serving(model, *flags) as new, serving(model, *flags, wrapper=old_server) as old:
        expected = encoded(ROOT, new.target, tmp_path / "expected.npz")
        for root, server in ((previous, new), (ROOT, old), (previous, old)):
            rows = encoded(root, server.target, tmp_path / "rows.npz")
            assert len(rows) == len(expected)
            assert all(error(a, b) <= TOLERANCE for a, b in zip(rows, expected, strict=True))


@pytest.mark.parametrize("processes", [1, 2])
def test_what_the_last_server_lacks_is_not_used_unasked(
    checkpoints: Checkpoints, previous: Path, tmp_path: Path, processes: int
) -> None:
    """Defaults work on the last server; a file sent as it is gets an error of the client, not a crash of the server."""
    photo = tmp_path / "photo.png"
    Image.fromarray(np.full((60, 80, 3), 7, np.uint8)).save(photo)
    wrapper = ("env", f"PYTHONPATH={previous / 'client'}:{previous / 'server'}")
    model = checkpoints("qwen3_vl")
    flags = ("--rpc-processes", str(processes))
    with serving(model, *flags, wrapper=wrapper) as old, Client(old.target) as client:
        (expected,) = client.encode_images([photo])
        with suppress(VitwireError):
            (rows,) = client.encode([Item.from_file(photo)])
            assert error(rows.numpy(), expected.numpy()) <= TOLERANCE
        assert len(client.encode_images([photo] * 8)) == 8
