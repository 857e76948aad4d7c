"""SAM's relative positions, gathered ahead, against the stock forward that gathers them each time."""

import pytest
import torch
from transformers.models.deepseek_ocr2.configuration_deepseek_ocr2 import DeepseekOcr2SamVisionConfig
from transformers.models.deepseek_ocr2.modeling_deepseek_ocr2 import DeepseekOcr2SamVisionEncoder

from vitwire_server.demo.checkpoint import randomise
from vitwire_server.towers.shared.learned import gather_relative_positions

SIDES = (16, 12)
"""Patches of the larger view, which the tables are of, and of the smaller one, to which they are resampled."""


@pytest.mark.parametrize("side", SIDES)
def test_rows_are_those_of_the_stock_forward(side: int) -> None:
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
