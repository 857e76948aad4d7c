"""Learned positions against stock modules: by shares of an image's sides, and SAM's relative ones, gathered ahead."""

from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers.models.deepseek_ocr2.configuration_deepseek_ocr2 import DeepseekOcr2SamVisionConfig
from transformers.models.deepseek_ocr2.modeling_deepseek_ocr2 import DeepseekOcr2SamVisionEncoder
from transformers.models.idefics2.modeling_idefics2 import Idefics2VisionEmbeddings
from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionEmbeddings

from checkpoints import Checkpoints
from rigs import Rig
from vitwire_server.core.grids import Grid
from vitwire_server.demo.checkpoint import randomise
from vitwire_server.towers.shared.learned import fractional_positions, gather_relative_positions

SIDES = (16, 12)
"""Patches of SAM's larger view, which the tables are of, and of the smaller one, to which they are resampled."""


@pytest.mark.parametrize("stock", [Idefics2VisionEmbeddings, Idefics3VisionEmbeddings])
@pytest.mark.parametrize("side", [4, 19, 26, 27, 32, 70])
def test_positions_are_those_of_the_stock_embeddings(stock: Any, side: int) -> None:
    config = stock.__init__.__annotations__["config"](
        hidden_size=2, num_attention_heads=1, image_size=side, patch_size=1, num_channels=1
    )
    embeddings = stock(config)
    looked_up: list[torch.Tensor] = []
    embeddings.position_embedding.register_forward_pre_hook(lambda _, given: looked_up.append(given[0]))
    for rows, columns in ((side, side), (1, 3), (9, 25), (41, 7)):
        embeddings(torch.zeros(1, 1, rows, columns), torch.ones(1, rows, columns, dtype=torch.bool))
        assert torch.equal(looked_up[-1][0], fractional_positions(rows, columns, side))


@pytest.mark.parametrize("side", SIDES)
def test_gathered_positions_give_the_rows_of_the_stock_forward(side: int) -> None:
    config = DeepseekOcr2SamVisionConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=4 * SIDES[0],
        patch_size=4,
        window_size=5,
        global_attn_indexes=[1, 2],
        output_channels=16,
        mlp_dim=48,
        downsample_channels=[16, 16],
    )
    config._attn_implementation = "sdpa"
    encoder = DeepseekOcr2SamVisionEncoder(config).eval()
    randomise(encoder, 0)
    pixels = torch.randn(2, 3, 4 * side, 4 * side, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = encoder(pixels).last_hidden_state
        gather_relative_positions(encoder, SIDES)
        torch.testing.assert_close(encoder(pixels).last_hidden_state, expected)
        for layer in encoder.layers:
            for tables in layer.attn.gathered:
                for _, rows in tables.named_buffers():
                    rows.zero_()
        assert not torch.allclose(encoder(pixels).last_hidden_state, expected), "positions come from what was gathered"


@pytest.mark.parametrize("model_type", ["muse_glimmer", "muse_spark"])
@pytest.mark.parametrize(("rows", "columns"), [(4, 10), (10, 4), (6, 6)])
def test_muse_reads_its_positions_as_the_code_that_meta_published(
    model_type: str, rows: int, columns: int, checkpoints: Checkpoints
) -> None:
    """torchtitan's `_VisionPosEmbed` in the commit that added the model: coordinates `(y, x)` of an "xy" mesh."""
    tower: Any = Rig.of(checkpoints(model_type), torch.float32, torch.device("cpu"), sizes=()).tower
    table = tower.model.patch_embedder.position_embedding_table.weight.detach()
    side = round(len(table) ** 0.5)
    down, across = (torch.linspace(1 / count - 1, 1 - 1 / count, count) for count in (rows, columns))
    places = torch.stack(torch.meshgrid(down, across, indexing="xy"), dim=-1).view(1, 1, -1, 2)
    image = table.T.view(1, -1, side, side)
    expected = functional.grid_sample(image, places, mode="bilinear", align_corners=False)[0, :, 0].T
    computed = tower._compute(Grid(2, rows, columns))
    read = (table[computed["interp_indices"]] * computed["interp_weights"][:, :, None]).sum(1)
    torch.testing.assert_close(read, expected.repeat(2, 1))
