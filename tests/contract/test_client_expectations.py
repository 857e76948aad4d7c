"""What the client expects of an embedding is what each tower gives."""

import pytest
import torch

from checkpoints import ROWS, Checkpoints
from client_models import client_model
from vitwire import Item
from vitwire._delivery.answers import Expected
from vitwire.items import Modality
from vitwire_server.core.grids import Grid
from vitwire_server.towers.checkpoints.checkpoint import load_tower, open_checkpoint

GRIDS: list[tuple[tuple[int, int, int], Modality]] = [((1, 12, 12), "image"), ((4, 12, 12), "video")]


@pytest.mark.parametrize("model_type", ROWS)
def test_rows_and_width_are_those_of_the_tower(model_type: str, checkpoints: Checkpoints) -> None:
    folder = checkpoints(model_type)
    device = torch.device("cpu")
    tower = load_tower(
        open_checkpoint(str(folder)), dtype=torch.float32, device=device, track=lambda shards, *_: shards
    ).tower
    for grid, modality in GRIDS:
        expected = Expected.of(Item(None, grid, modality, content_id="x"), client_model(folder))
        assert expected.width == tower.geometry.width
        if not expected.rows:
            continue
        rows = tower.footprint(Grid(*grid)).rows
        assert rows == expected.rows if expected.exact else rows <= expected.rows
