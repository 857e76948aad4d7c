"""`make demo`: real photographs and a clip through a real server, compared with plain transformers.

Writes a tiny Qwen3-VL-shaped checkpoint with random weights, starts a server on it, has it prepare and
encode pictures through the gRPC client, and computes the same embeddings with the stock tower on the
stock processor's output. Exits 0 only if all agree. The last line of stdout is one JSON document.
"""

import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import skimage
from numpy.typing import NDArray
from PIL import Image
from rich.console import Console
from rich.table import Table
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from vitwire import Client, Embedding

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from reference import TOLERANCE, Array, Reference, error
from servers import serving
from vitwire_server.demo.checkpoint import write_demo_checkpoint

Frames = NDArray[np.uint8]
GridTuple = tuple[int, int, int]
_FLAGS = ("--dtype", "float32", "--graphs", "simulated", "--max-budget-tokens", "512")


@dataclass(frozen=True, slots=True)
class Row:
    """One item of the demo: its embedding, time and error."""

    name: str
    grid: GridTuple
    embedding: Embedding
    milliseconds: float
    error: float


def photographs() -> dict[str, Image.Image]:
    """Photographs of different sizes, which scikit-image brings."""
    folder = Path(skimage.__file__).parent / "data"
    names = ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg")
    images = {name: Image.open(folder / name).convert("RGB") for name in names}
    return {**images, "astronaut (2x)": images["astronaut.png"].resize((1024, 1024))}


def pan(photograph: Image.Image, frames: int = 8, side: int = 224) -> Frames:
    """A clip `(frames, side, side, 3)`: the camera pans over a photograph."""
    pixels = np.asarray(photograph)
    steps = np.linspace(0, min(pixels.shape[0], pixels.shape[1]) - side, frames).astype(int)
    return np.stack([pixels[step : step + side, step : step + side] for step in steps])


def image_reference(checkpoint: Path, image: Image.Image, reference: Reference) -> tuple[Array, GridTuple]:
    """Embedding and grid of an image by the stock processor and the stock tower."""
    inputs = Qwen2VLImageProcessorPil.from_pretrained(checkpoint)(image, return_tensors="pt")
    t, h, w = inputs["image_grid_thw"][0].tolist()
    return reference.encode(inputs["pixel_values"], [(t, h, w)])[0], (t, h, w)


def clip_reference(checkpoint: Path, frames: Frames, reference: Reference) -> tuple[Array, GridTuple]:
    """Embedding and grid of a clip by the stock tower, whose patches hold two frames.

    The stock processor of clips needs torchvision, so that of images cuts each frame, which it does not resize.
    """
    inputs = Qwen2VLImageProcessorPil.from_pretrained(checkpoint)(list(frames), return_tensors="np")
    (_, h, w), count = inputs["image_grid_thw"][0].tolist(), len(frames)
    assert h * w * reference.vision_config.patch_size**2 == frames[0, ..., 0].size, "no frame is resized"
    single = inputs["pixel_values"].reshape(count, h * w, 3, 2, -1)[:, :, :, 0]
    pairs = np.stack([single[::2], single[1::2]], axis=3)
    grid = (count // 2, h, w)
    return reference.encode(pairs.reshape(count // 2 * h * w, -1), [grid])[0], grid


def compare(client: Client, checkpoint: Path) -> list[Row]:
    """Encode everything, one item at a time and then all images packed."""
    rows: list[Row] = []
    images = photographs()
    reference = Reference(checkpoint)
    expected = {name: image_reference(checkpoint, image, reference) for name, image in images.items()}
    for name, image in images.items():
        start = time.perf_counter()
        embedding = client.encode_images([image])[0]
        rows.append(_row(name, embedding, start, *expected[name]))
    clip = pan(images["coffee.png"])
    start = time.perf_counter()
    embedding = client.encode_clips([clip])[0]
    rows.append(_row("coffee.png (8 frames)", embedding, start, *clip_reference(checkpoint, clip, reference)))
    start = time.perf_counter()
    packed = client.encode_images(list(images.values()))
    rows += [
        _row(f"{name}, packed", embedding, start, *expected[name])
        for name, embedding in zip(images, packed, strict=True)
    ]
    return rows


def _row(name: str, embedding: Embedding, start: float, expected: Array, grid: GridTuple) -> Row:
    milliseconds = (time.perf_counter() - start) * 1000
    assert embedding.grid == grid, "the server prepares as the processor does"
    return Row(name, grid, embedding, milliseconds, error(embedding.numpy(), expected))


def show(rows: list[Row]) -> None:
    """Print the table."""
    table = Table("item", "grid", "tokens", "path", "budget", "ms", "max error")
    for row in rows:
        report = row.embedding.report
        path = f"{report.path} ({report.fallback_reason})" if report.fallback_reason else report.path
        cells = (
            row.name,
            "x".join(map(str, row.grid)),
            str(report.tokens),
            path,
            str(report.budget_tokens or "-"),
        )
        table.add_row(*cells, f"{row.milliseconds:.1f}", f"{row.error:.1e}")
    Console(width=110).print(table)


def document(rows: list[Row]) -> dict[str, object]:
    """The results as JSON, for the last line."""
    reports = [row.embedding.report for row in rows]
    return {
        "agree": all(row.error <= TOLERANCE for row in rows),
        "items": len(rows),
        "graph": sum(report.path == "graph" for report in reports),
        "eager": sum(report.path == "eager" for report in reports),
        "tokens": sum(report.tokens for report in reports),
        "max_error": max(row.error for row in rows),
    }


def main() -> int:
    """Run the demo; 0 if every embedding agrees."""
    with tempfile.TemporaryDirectory(prefix="vitwire-demo-") as folder:
        checkpoint = Path(folder) / "tiny-qwen3-vl"
        write_demo_checkpoint("qwen3_vl", checkpoint)
        with serving(checkpoint, *_FLAGS) as server, Client(server.target) as client:
            rows = compare(client, checkpoint)
    show(rows)
    figures = document(rows)
    print(json.dumps(figures))
    return 0 if figures["agree"] else 1


if __name__ == "__main__":
    sys.exit(main())
