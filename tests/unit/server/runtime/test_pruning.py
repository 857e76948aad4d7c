"""Which tokens of a clip are kept, against the published rule in float64."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

import reference
from vitwire_server.core.grids import Footprint, Grid, retained
from vitwire_server.core.items import DType, Item, Modality, Pixels
from vitwire_server.runtime.staging import kept_tokens, prune

ROUNDING = 1e-5
FRAMES, SIDES = st.integers(1, 6), st.integers(1, 5)
RATIOS = st.floats(0, 1, exclude_min=True, exclude_max=True)


def kept(rows: Tensor, frames: int, ratio: float) -> list[int]:
    chosen: list[int] = kept_tokens(rows, frames, retained(len(rows), frames, ratio)).tolist()
    return chosen


def item(grid: Grid, ratio: float) -> Item:
    footprint = Footprint(grid.patches, grid.patches // 4, grid.t, grid.frame_patches)
    return Item(Modality.VIDEO, grid, Pixels(b"", DType.UINT8, (0,)), footprint, DType.FLOAT32, ratio)


@given(FRAMES, SIDES, SIDES, st.integers(1, 32), RATIOS, st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_the_most_changed_tokens_are_kept(
    frames: int, rows: int, columns: int, width: int, ratio: float, motion: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    scene = rng.standard_normal((1, rows * columns, width))
    clip = (scene + motion * rng.standard_normal((frames, rows * columns, width))).reshape(-1, width)
    clip = (clip * 10 ** rng.uniform(-3, 3)).astype(np.float32)
    expected, clear = reference.kept_tokens(clip, frames, ratio)
    assume(clear > ROUNDING)
    assert kept(torch.from_numpy(clip), frames, ratio) == expected


@given(st.data(), FRAMES, SIDES, RATIOS)
def test_of_equal_changes_the_earlier_token_is_kept(
    data: st.DataObject, frames: int, tokens: int, ratio: float
) -> None:
    # Cosines of these are exactly -1, 0 or 1, so that most changes tie.
    values = st.sampled_from([(0, 0), (1, 0), (4, 0), (-2, 0), (0, 1), (0, -8)])
    drawn = data.draw(st.lists(values, min_size=frames * tokens, max_size=frames * tokens))
    clip = torch.tensor(drawn, dtype=torch.float32)
    assert kept(clip, frames, ratio) == reference.kept_tokens(clip.numpy(), frames, ratio)[0]


@given(FRAMES, SIDES, st.integers(1, 300), RATIOS, st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_frames_that_never_change_are_kept_from_the_first_on(
    frames: int, tokens: int, width: int, ratio: float, dtype: torch.dtype
) -> None:
    scene = torch.randn(tokens, width, generator=torch.Generator().manual_seed(width)).to(dtype)
    assert kept(scene.repeat(frames, 1), frames, ratio) == list(range(retained(frames * tokens, frames, ratio)))


def test_a_static_scene_keeps_its_first_frame_and_what_moved() -> None:
    clip = torch.randn(6, generator=torch.Generator().manual_seed(0)).repeat(4, 9, 1)
    assert kept(clip.flatten(0, 1), 4, 0.25) == list(range(9))
    clip[2:, 5] = -clip[2:, 5]
    assert kept(clip.flatten(0, 1), 4, 10 / 36) == [*range(9), 2 * 9 + 5]


def test_rows_without_a_direction_count_as_changed() -> None:
    clip = torch.ones(4, 3, 2)
    clip[3, 1] = 0
    assert kept(clip.flatten(0, 1), 4, 4 / 12) == [0, 1, 2, 10]


@pytest.mark.parametrize(
    ("tokens", "frames", "ratio", "rows"),
    [(12, 4, 0.0, 12), (12, 4, 0.5, 6), (12, 4, 0.59, 7), (12, 4, 0.1, 3), (12, 4, 0.999, 11), (12, 1, 0.1, 12)],
)
def test_the_number_of_rows_is_known_ahead(tokens: int, frames: int, ratio: float, rows: int) -> None:
    assert retained(tokens, frames, ratio) == rows


def test_tokens_are_chosen_by_the_main_columns_of_the_towers_own_rows() -> None:
    random = torch.Generator().manual_seed(3)
    clip, still = item(Grid(3, 4, 4), 0.5), item(Grid(2, 4, 2), 0.0)
    parts = [torch.randn(each.footprint.tokens, 12, generator=random) for each in (clip, still)]
    parts[0][:, 4:] *= 1e6  # deepstack
    rows = [torch.randn(part.shape, generator=random) for part in parts]
    chosen, tokens = prune([clip, still], parts, rows, main=4)
    expected, clear = reference.kept_tokens(parts[0][:, :4].numpy(), 3, 0.5)
    assert clear > ROUNDING
    assert tokens.tolist() == expected
    torch.testing.assert_close(chosen[0], rows[0][expected], rtol=0, atol=0)
    assert chosen[1] is rows[1]
    assert prune([still], parts[1:], rows[1:], main=4)[1].shape == (0,)


def test_nothing_waits_for_the_device() -> None:
    """The meta device has no values: whatever looks at one raises there."""
    clips = [item(Grid(t, 8, 6), ratio) for t, ratio in ((1, 0.5), (4, 0.3), (5, 0.0))]
    parts = [torch.empty(clip.footprint.tokens, 24, dtype=torch.bfloat16, device="meta") for clip in clips]
    chosen, tokens = prune(clips, parts, parts, main=8)
    assert [tuple(own.shape) for own in chosen] == [(clip.rows, 24) for clip in clips] == [(12, 24), (14, 24), (60, 24)]
    assert tokens.shape == (26,)
