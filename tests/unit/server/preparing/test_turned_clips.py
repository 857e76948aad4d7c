"""Clips with a display matrix, as phones write them: turned as players show them, before their grid is computed."""

import io
from collections.abc import Sequence
from itertools import product
from struct import pack

import av
import numpy as np
import pytest

from encoded_files import Frame, clip, frames_of, moving
from prepared import MODELS, SAMPLING
from vitwire_server.core.items import Modality
from vitwire_server.preparing.files import clips
from vitwire_server.preparing.rules.forms import form_of
from vitwire_server.preparing.rules.sampling import sampled

ONE = 1 << 16
RECIPE = MODELS["patches"][Modality.VIDEO]
FRAMES = moving(10, 48, 80)
PIXELS = 1 << 26
IDENTITY = (ONE, 0, 0, 0, ONE, 0, 0, 0, 1 << 30)


def matrix(across: float, down_by_across: float, across_by_down: float, down: float) -> list[int]:
    """The matrix that shows a pixel (x, y) at (across * x + across_by_down * y, down_by_across * x + down * y)."""
    numbers = [round(each * ONE) for each in (across, down_by_across, across_by_down, down)]
    return [*numbers[:2], 0, *numbers[2:], 0, 0, 0, 1 << 30]


QUARTERS = [
    *(matrix(across, 0, 0, down) for across, down in product((1, -1), repeat=2)),
    *(matrix(0, b, c, 0) for b, c in product((1, -1), repeat=2)),
]


def shown(frame: Frame, numbers: Sequence[int]) -> Frame:
    """Each pixel where the matrix shows it."""
    y, x = np.indices(frame.shape[:2])
    a, b, _, c, d = (np.sign(each) for each in numbers[:5])
    right, below = a * x + c * y, b * x + d * y
    right, below = right - right.min(), below - below.min()
    found = np.zeros((below.max() + 1, right.max() + 1, 3), np.uint8)
    found[below, right] = frame
    return found


def read(file: bytes) -> list[Frame]:
    """The frames in a file, whose form was known from its header."""
    measured = clips.measure(file, RECIPE, PIXELS)
    with clips.decoded(file, RECIPE, PIXELS) as (frames, count):
        found = list(frames)
    picture = (len(found), *found[0].shape)
    assert count == len(found)
    assert measured.picture == picture
    assert measured.grid == form_of(picture, RECIPE).grid
    return found


def expected(file: bytes, numbers: Sequence[int]) -> list[Frame]:
    indices = sampled(len(FRAMES), 10.0, SAMPLING, RECIPE.temporal)
    return [shown(frame, numbers) for frame in frames_of(file, indices)]


@pytest.mark.parametrize("numbers", QUARTERS, ids=str)
def test_every_quarter_and_mirror(numbers: list[int]) -> None:
    file = clip(FRAMES, matrix=numbers)
    found = read(file)
    np.testing.assert_array_equal(found, expected(file, numbers))
    assert (found[0].shape[:2] == (80, 48)) is (numbers[0] == 0)


@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_rotations_are_those_of_ffmpeg(degrees: int) -> None:
    """By the side data of its frames, as its own program turns them."""
    turns = {90: (0, 1, -1, 0), 180: (-1, 0, 0, -1), 270: (0, -1, 1, 0)}
    file = clip(FRAMES, matrix=matrix(*turns[degrees]))
    with av.open(io.BytesIO(file)) as container:
        frame = next(container.decode(video=0))
        quarters, stored = frame.rotation // 90, frame.to_ndarray(format="rgb24")
    assert quarters % 4 == -degrees // 90 % 4
    np.testing.assert_array_equal(read(file)[0], np.rot90(stored, quarters))


@pytest.mark.parametrize(
    ("kind", "codec"),
    [("mov", "libx264"), ("matroska", "libx264"), ("webm", "libvpx-vp9"), ("mp4", "mpeg4"), ("mp4", "libx265")],
)
def test_other_containers_and_codecs(kind: str, codec: str) -> None:
    numbers = matrix(0, 1, -1, 0)
    file = clip(FRAMES, 10.0, kind, codec, matrix=numbers)
    np.testing.assert_array_equal(read(file), expected(file, numbers))


def test_the_matrix_of_the_whole_file_counts_too() -> None:
    plain, numbers = clip(FRAMES), matrix(0, 1, -1, 0)
    of_file = plain.replace(pack(">9i", *IDENTITY), pack(">9i", *numbers), 1)
    assert of_file.index(pack(">9i", *numbers)) < of_file.index(b"tkhd")
    np.testing.assert_array_equal(read(of_file), expected(plain, numbers))
    both = of_file.replace(pack(">9i", *IDENTITY), pack(">9i", *numbers), 1)
    np.testing.assert_array_equal(read(both), expected(plain, matrix(-1, 0, 0, -1)))


@pytest.mark.parametrize("numbers", [matrix(2, 0, 0, 3), matrix(0, 2, -0.5, 0), matrix(0.005, 1, -1, 0.005)], ids=str)
def test_frames_are_turned_but_not_stretched(numbers: list[int]) -> None:
    file = clip(FRAMES, matrix=numbers)
    turn = matrix(*(round(each / max(map(abs, numbers[:5]))) or 0 for each in numbers[:2]), -1, 0)
    np.testing.assert_array_equal(read(file), expected(file, IDENTITY if numbers[0] > ONE else turn))


@pytest.mark.parametrize(
    "numbers", [matrix(0.7, 0.7, -0.7, 0.7), matrix(1, 0.1, -0.1, 1), matrix(0, 0, 0, 0), matrix(1, 0, 0, 0)], ids=str
)
def test_other_angles_are_shown_as_stored(numbers: list[int]) -> None:
    file = clip(FRAMES, matrix=numbers)
    np.testing.assert_array_equal(read(file), expected(file, IDENTITY))


def test_vp8_is_shown_as_stored() -> None:
    """Its matrix cannot be asked for, as MP4 files do not have this codec."""
    file = clip(FRAMES, 10.0, "webm", "libvpx", matrix=matrix(0, 1, -1, 0))
    np.testing.assert_array_equal(read(file), expected(file, IDENTITY))
