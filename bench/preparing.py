"""Photographs to rows of a tower's input: Pillow on one core, torch's resize, and our kernel.

    PYTHONPATH=client:gateway:server:tests/support:. python bench/preparing.py [--sizes 1080x1920] [--batch 8]
    ... python bench/preparing.py --device cpu --tiny          # shows that it runs, not how fast

Rows are those of Qwen3-VL, of at most 1024 tokens, in bfloat16. Every time is the median of several runs, for one
picture; `torch_resize` only resizes, on one thread of the CPU, and differs from Pillow. The last line of stdout is one
JSON document.
"""

import argparse
import json
import platform
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import PIL
import torch
from bench.timing import repeated, seconds_of

from vitwire_server.core.items import Modality
from vitwire_server.core.models import Geometry, Preprocessing
from vitwire_server.preparing import pillow
from vitwire_server.preparing.device.resizing import Job, prepare
from vitwire_server.preparing.rules.patches import resized
from vitwire_server.preparing.rules.recipe import Recipe
from vitwire_server.runtime.staging import Stager

SIZES = ("448x448", "1024x1024", "1080x1920", "3024x4032")
TINY = ("60x80",)
PATCH, MERGE, TEMPORAL = 16, 2, 2
TOKENS, TINY_TOKENS = 1024, 2
SECONDS_EACH = 1.0
Row = dict[str, Any]


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    device = torch.device(options.device)
    recipe = _recipe(TINY_TOKENS if options.tiny else TOKENS)
    sizes = options.sizes or (TINY if options.tiny else SIZES)
    rows = [_measured(size, recipe, device, options.batch) for size in sizes]
    print(
        json.dumps(
            {
                "bench": "preparing",
                "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
                "torch": torch.__version__,
                "pillow": PIL.__version__,
                "machine": platform.machine(),
                "batch": options.batch,
                "rows": rows,
            }
        )
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", metavar="HxW", help=f"of photographs (default: {' '.join(SIZES)})")
    parser.add_argument("--batch", type=int, default=8, help="pictures that our kernel prepares together")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true", help="a tiny picture")
    return parser.parse_args()


def _recipe(tokens: int) -> Recipe:
    side = PATCH * MERGE
    settings = Preprocessing(side**2, tokens * side**2, (0.5,) * 3, (0.5,) * 3, 1 / 255, PIL.Image.Resampling.BICUBIC)
    return Recipe(settings, PATCH, MERGE, TEMPORAL)


def _measured(size: str, recipe: Recipe, device: torch.device, batch: int) -> Row:
    """Milliseconds of each way for a photograph of this size, once all rows are found equal."""
    height, width = map(int, size.split("x"))
    picture = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    on_host, on_device = torch.from_numpy(picture), torch.from_numpy(picture).to(device)
    target = resized(height, width, recipe, TEMPORAL)
    stager = Stager(Geometry(PATCH, MERGE, TEMPORAL, 3, 8, 0), {Modality.IMAGE: recipe.settings}, device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    count = target[0] * target[1] // PATCH**2
    whole = torch.zeros(batch, count, 3 * TEMPORAL * PATCH**2, dtype=dtype, device=device)
    expected = torch.zeros_like(whole[0])

    jobs = [Job(on_device, recipe, rows) for rows in whole]
    stager.stage(
        torch.from_numpy(pillow.prepared(picture, recipe).pixels).to(device).view(-1), Modality.IMAGE, expected
    )
    prepare(jobs)
    assert all(torch.equal(rows, expected) for rows in whole), "rows are equal"
    planes = on_host.permute(2, 0, 1)[None]
    host = torch.device("cpu")
    return {
        "size": size,
        "target": f"{target[0]}x{target[1]}",
        "pillow": _milliseconds(lambda: pillow.prepared(picture, recipe), host),
        "torch_resize": _milliseconds(
            lambda: torch.nn.functional.interpolate(planes, target, mode="bicubic", antialias=True), host
        ),
        "kernel": _milliseconds(lambda: prepare(jobs[:1]), device),
        "kernel_of_batch": round(_milliseconds(lambda: prepare(jobs), device) / batch, 4),
    }


def _milliseconds(run: Callable[[], object], device: torch.device) -> float:
    taken = repeated(lambda: seconds_of(run, device), SECONDS_EACH, warm_ups=1, least=3, most=200)
    return round(1e3 * median(taken), 4)


if __name__ == "__main__":
    main()
