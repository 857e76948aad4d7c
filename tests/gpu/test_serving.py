"""A server on the device for each mechanism of the table: started as a user starts it, asked over the wire."""

import pytest
import torch

from checkpoints import EVERYDAY, Checkpoints
from reference import norm_error
from references import reference_of
from rigs import RIGHT, Rig, draw_grids
from servers import serving
from vitwire import Client, Item
from vitwire_server.core.items import Modality

FLAGS = ("--dtype", "bfloat16", "--max-budget-tokens", "1280", "--rpc-processes", "2")

KINDS = ("total", "free", "reserved", "used", "graphs")


def check_memory(nbytes: dict[str, float]) -> None:
    """What docs/metrics.md says of the kinds."""
    assert nbytes["total"] == torch.cuda.get_device_properties(0).total_memory
    assert 0 < nbytes["graphs"] < nbytes["reserved"]
    assert 0 < nbytes["used"] < nbytes["reserved"]
    assert nbytes["reserved"] + nbytes["free"] < nbytes["total"]


@pytest.mark.parametrize("model_type", EVERYDAY)
def test_rows_are_those_of_transformers(model_type: str, checkpoints: Checkpoints, device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("tests/e2e does it on a CPU")
    folder = checkpoints(model_type)
    rig = Rig.of(folder, torch.float32, torch.device("cpu"), sizes=())
    grids = draw_grids(rig, 3, 10)
    drawn = [(rig.pixels(grid, i), rig.crops(grid, i)) for i, grid in enumerate(grids)]
    items = [
        Item(pixels, grid, "video" if rig.modality(grid) is Modality.VIDEO else "image", crops=crops)
        for grid, (pixels, crops) in zip(grids, drawn, strict=True)
    ]
    with serving(folder, "--device", str(device), *FLAGS) as server, Client(server.target) as client:
        together, alone = client.encode(items), [client.encode([item])[0] for item in items]
        assert server.metric("vitwire_graphs_dropped") == 0, server.log()
        check_memory({kind: server.metric("vitwire_device_memory_bytes", kind=kind) for kind in KINDS})
    reference = reference_of(model_type, folder)
    for number, (grid, (pixels, crops)) in enumerate(zip(grids, drawn, strict=True)):
        exact = reference.item(grid, pixels, crops)
        assert norm_error(together[number].numpy(), exact) <= RIGHT
        assert norm_error(alone[number].numpy(), exact) <= RIGHT
    assert "graph" in {embedding.report.path for embedding in (*together, *alone)}
