"""Positions by shares of an image's sides, against the stock embeddings of Idefics 2 and 3."""

from typing import Any

import pytest
import torch
from transformers.models.idefics2.modeling_idefics2 import Idefics2VisionEmbeddings
from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionEmbeddings

from vitwire_server.towers.shared.learned import fractional_positions


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
