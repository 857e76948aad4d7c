"""`--record-trace`: what a server records is what `vitwire-server budgets` reads."""

import json
from pathlib import Path

import numpy as np
import pytest

from checkpoints import Checkpoints
from servers import finished, serving
from vitwire import Client, InvalidItem, Item

COLUMNS = 3 * 2 * 14 * 14


def item(t: int, h: int, w: int, modality: str = "image") -> Item:
    pixels = np.random.default_rng(0).random((t * h * w, COLUMNS), np.float32)
    return Item(pixels, (t, h, w), modality=modality)


def test_recorded_sizes_fit_a_ladder(checkpoints: Checkpoints, tmp_path: Path) -> None:
    trace, ladder = tmp_path / "trace.jsonl", tmp_path / "ladder.json"
    large = item(1, 32, 32)
    with serving(checkpoints("qwen2_vl"), "--record-trace", str(trace)) as server, Client(server.target) as client:
        client.encode([item(1, 4, 6), item(2, 4, 4, "video")])
        client.encode([large, large])  # more than one message holds: EncodeStream
        try:
            client.encode([item(1, 3, 4)])
        except InvalidItem:
            pass
        else:
            raise AssertionError("an odd grid is refused")
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    image, clip, streamed = ([1, 4, 6], [2, 4, 4], [1, 32, 32])
    assert [line["items"] for line in lines] == [
        [{"modality": "image", "grid": image}, {"modality": "video", "grid": clip}],
        [{"modality": "image", "grid": streamed}],
        [{"modality": "image", "grid": streamed}],
    ]
    seconds = [line["t"] for line in lines]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0

    done = finished("budgets", "--trace", str(trace), "--count", "4", "--out", str(ladder))
    assert done.returncode == 0, done.stderr
    budgets = json.loads(done.stdout.splitlines()[-1])["budgets"]
    assert json.loads(ladder.read_text()) == {"budgets": budgets}
    assert 256 in budgets, "the tokens of the large image"


@pytest.mark.parametrize("model_type", ["gemma4", "siglip2"])
def test_tokens_that_are_not_quarters_of_patches_fit_a_ladder(
    model_type: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    with serving(checkpoints(model_type), "--record-trace", str(trace)) as server, Client(server.target) as client:
        (photo,) = client.encode_images([np.zeros((192, 192, 3), np.uint8)])
    tokens = photo.shape[0]
    (line,) = [json.loads(line) for line in trace.read_text().splitlines()]
    assert line["items"][0]["footprint"]["tokens"] == tokens
    done = finished("budgets", "--trace", str(trace))
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert tokens in document["budgets"]
    assert (document["padding"], document["eager"]) == (0.0, 0)


def test_a_trace_that_cannot_be_written_is_told_at_once() -> None:
    done = finished("serve", "--model", "m/m", "--port", "0", "--metrics-port", "0", "--record-trace", "/nowhere/trace")
    assert done.returncode == 2
    assert done.stderr == "vitwire-server: --record-trace: [Errno 2] No such file or directory: '/nowhere/trace'\n"
