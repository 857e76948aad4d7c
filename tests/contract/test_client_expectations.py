"""What the client expects of an embedding is what each tower gives."""

import pytest

from broken import load
from checkpoints import ROWS, Checkpoints
from client_models import client_model
from vitwire import Item
from vitwire._delivery.answers import Expected
from vitwire.items import Modality
from vitwire_server.core.grids import Grid

GRIDS: list[tuple[tuple[int, int, int], Modality]] = [((1, 12, 12), "image"), ((4, 12, 12), "video")]


@pytest.mark.parametrize("model_type", ROWS)
def test_rows_and_width_are_those_of_the_tower(model_type: str, checkpoints: Checkpoints) -> None:
    folder = checkpoints(model_type)
    tower = load(folder).tower
    for grid, modality in GRIDS:
        expected = Expected.of(Item(None, grid, modality, content_id="x"), client_model(folder))
        assert expected.width == tower.geometry.width
        if not expected.rows:
            continue
        rows = tower.footprint(Grid(*grid)).rows
        assert rows == expected.rows if expected.exact else rows <= expected.rows
