"""Which pictures go to the device, and what every rule makes of odd sizes."""

from dataclasses import replace
from itertools import product

import pytest

from cards import CARD
from prepared import MODELS
from vitwire_server.core.items import Modality
from vitwire_server.core.models import Place, Preparation
from vitwire_server.preparing.rules.forms import form_of
from vitwire_server.rpc.file_items import MAX_PICTURE_BYTES, goes_to_device

ON_DEVICE = replace(CARD, preparation=Preparation(Place.DEVICE, None))
SIDES = (1, 2, 13, 31, 32, 33, 55, 56, 57, 335, 1_000, 20_000, 100_000, 1 << 26)


@pytest.mark.parametrize(
    "shape", [(1, 1, 3), (10, 320, 3), (320, 10, 3), (1, 32, 3), (7, 10, 320, 3), (4096, 8192, 3)], ids=str
)
def test_pictures_for_the_device(shape: tuple[int, ...]) -> None:
    assert goes_to_device(shape, ON_DEVICE)
    assert not goes_to_device(shape, CARD)


@pytest.mark.parametrize(
    "shape",
    [(), (3,), (9, 3), (1, 1, 9, 9, 3), (0, 9, 3), (9, 0, 3), (9, 9, 4), (10, 321, 3), (330, 10, 3), (2, 330, 10, 3),
     (1, 30_000_000, 3), (MAX_PICTURE_BYTES // 3 + 1, 1, 1, 3)],
    ids=str,
)  # fmt: skip
def test_pictures_for_a_decoder(shape: tuple[int, ...]) -> None:
    """Of other shapes, with alpha, too large, or so elongated that resizing would hold up the engine."""
    assert not goes_to_device(shape, ON_DEVICE)


@pytest.mark.parametrize("name", MODELS)
def test_any_size_has_a_form_or_a_reason(name: str) -> None:
    """A rule fails by ValueError only: anything else would end a whole request."""
    recipe = MODELS[name][Modality.IMAGE]
    for size in product(SIDES, SIDES):
        try:
            form = form_of((*size, 3), recipe)
        except ValueError as error:
            assert f"{size[0]}x{size[1]}" in str(error) or "elongated" in str(error)
        else:
            assert min(form.pixels) > 0
