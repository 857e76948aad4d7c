"""Pruned clips over the wire, against rows of plain transformers chosen by the published rule."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from checkpoints import Checkpoints
from entered import entered
from reference import TOLERANCE, Array, Reference, error, kept_tokens
from servers import PIXELS_ONLY, ServerProcess, serving
from vitwire import Client, Embedding, Item

References = Callable[..., Reference]
CLEAR = 1e-5
"""Choices of the reference that are closer than this may fall differently in float32."""
FLAGS = (*PIXELS_ONLY, "--dtype", "float32", "--max-budget-tokens", "256", "--graphs")

server = entered(
    lambda checkpoints, request: serving(checkpoints("qwen3_vl"), *FLAGS, request.param), params=["off", "simulated"]
)


@dataclass(frozen=True, slots=True)
class Case:
    """An item, its rows by plain transformers, and those of them that are to be kept."""

    item: Item
    whole: Array
    kept: list[int]

    def check(self, embedding: Embedding, tolerance: float = TOLERANCE) -> None:
        assert list(embedding.report.kept) == (self.kept if self.item.keep_ratio else [])
        assert embedding.report.tokens == len(self.kept) == embedding.shape[0]
        assert error(embedding.numpy(), self.whole[self.kept]) <= tolerance


def draw(reference: Reference, grid: tuple[int, int, int], ratio: float, seed: int, *, motion: float = 0.3) -> Case:
    """A scene in which each frame differs from a still by some noise."""
    config = reference.vision_config
    rng = np.random.default_rng(seed)
    columns = 3 * config.temporal_patch_size * config.patch_size**2
    still = rng.standard_normal((1, grid[1] * grid[2], columns))
    moved = rng.standard_normal((grid[0], grid[1] * grid[2], columns)) * rng.random((grid[0], 1, 1)) * motion
    pixels = (still + moved).reshape(-1, columns).astype(np.float32)
    whole = reference.encode(pixels, [grid])[0]
    levels = len(getattr(config, "deepstack_visual_indexes", None) or [])
    kept, clear = kept_tokens(whole[:, : whole.shape[1] // (1 + levels)], grid[0], ratio or 1.0)
    assert clear > CLEAR or not motion
    return Case(Item(pixels, grid, "video" if grid[0] > 1 else "image", keep_ratio=ratio), whole, kept)


def test_clips_are_pruned_beside_images_and_whole_clips(server: ServerProcess, references: References) -> None:
    reference = references("qwen3_vl", torch.float32)
    wanted = [((4, 8, 6), 0.5), ((1, 8, 12), 0.0), ((5, 4, 4), 0.0), ((6, 6, 10), 0.3), ((3, 4, 4), 0.1)]
    cases = [draw(reference, grid, ratio, seed) for seed, (grid, ratio) in enumerate(wanted)]
    assert [len(case.kept) for case in cases] == [24, 24, 20, 27, 4]
    before = server.metric("vitwire_tokens_total", kind="real")
    with Client(server.target) as client:
        embeddings = client.encode([case.item for case in cases])
    for case, embedding in zip(cases, embeddings, strict=True):
        case.check(embedding)
    parts = [embeddings[0].main, *embeddings[0].deepstack]
    assert [part.shape for part in parts] == [(24, embeddings[0].shape[1] // len(parts))] * len(parts)
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), embeddings[0].numpy())
    computed = sum(len(case.whole) for case in cases)
    assert server.metric("vitwire_tokens_total", kind="real") - before == computed


def test_pruning_leaves_graphs_on(server: ServerProcess, references: References) -> None:
    """Alone, so that no batch has more frames than a budget has slots for."""
    case = draw(references("qwen3_vl", torch.float32), (4, 8, 6), 0.5, 51)
    with Client(server.target) as client:
        embedding = client.encode([case.item])[0]
    case.check(embedding)
    assert (embedding.report.path == "graph") == bool(server.metric("vitwire_graphs_captured"))


def test_large_clips_are_pruned_when_they_come_in_chunks(server: ServerProcess, references: References) -> None:
    reference = references("qwen3_vl", torch.float32)
    cases = [draw(reference, (6, 24, 16), 0.4, 11), draw(reference, (8, 16, 24), 0.7, 12)]
    assert sum(case.item.pixels.nbytes for case in cases) > 4 << 20
    with Client(server.target) as client:
        for case, embedding in zip(cases, client.encode([case.item for case in cases]), strict=True):
            case.check(embedding)


def test_the_choice_does_not_depend_on_the_type_of_the_rows(server: ServerProcess, references: References) -> None:
    case = draw(references("qwen3_vl", torch.float32), (5, 6, 6), 0.45, 21)
    with Client(server.target) as client:
        case.check(client.encode([case.item], output_type="bfloat16")[0], 2**-8)


def test_a_static_scene_keeps_its_first_frame(server: ServerProcess, references: References) -> None:
    still = draw(references("qwen3_vl", torch.float32), (4, 6, 8), 0.25, 31, motion=0.0)
    all_of_it = Item(still.item.pixels, still.item.grid, "video", keep_ratio=1.0)
    with Client(server.target) as client:
        first, whole = client.encode([still.item, all_of_it])
    assert still.kept == list(range(12))
    still.check(first)
    assert (whole.report.kept, whole.shape) == ((), still.whole.shape)


def test_windowed_towers_prune_by_place_too(checkpoints: Checkpoints, references: References) -> None:
    case = draw(references("qwen2_5_vl", torch.float32), (4, 20, 12), 0.35, 41)
    with serving(checkpoints("qwen2_5_vl"), *FLAGS, "simulated") as process, Client(process.target) as client:
        case.check(client.encode([case.item])[0])
