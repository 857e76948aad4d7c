"""Models whose language model reads more of the tower than rows: Ovis 2, Llama 3.2 Vision, Phi-4 multimodal."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from vitwire._inputs.layouts import images_of_layouts
from vitwire.integrations.transformers._layout import Call
from vitwire.items import Item


def indicators(call: Call) -> Mapping[str, Tensor]:
    """Embeddings of the tokens between tiles: the last ones of the visual vocabulary."""
    count = call.model.config.vision_config.num_visual_indicator_tokens
    return {"visual_indicator_features": call.model.visual_embeddings_table.weight[-count:]}


def with_blank_tiles(outputs: Mapping[str, Any]) -> list[Item]:
    """Blank tiles have rows too, as tokens before an image attend to all rows in transformers."""
    return [Item(own.pixels, own.grid) for own in images_of_layouts(outputs, blank=True)]


def projected_states(call: Call, rows: list[Tensor]) -> Any:  # noqa: ANN401  # an output of transformers
    """Projected already, `(prompts, images, tiles, rows of a tile, width)`. Raises ValueError over padding."""
    prompts, images, tiles = call.pixels.shape[:3]
    if len(rows) != prompts * images:
        prompt, place = (call.arguments["aspect_ratio_ids"] == 0).nonzero()[0].tolist()
        field = f"aspect_ratio_ids[{prompt}][{place}]"
        raise ValueError(f"{field}: the prompts of a batch must have as many images each, got padding (0)")
    states = torch.stack(rows)
    return BaseModelOutput(last_hidden_state=states.view(prompts, images, tiles, -1, states.shape[-1]))


def placed_in_prompt(call: Call, rows: list[Tensor]) -> Tensor:
    """Embeddings of the prompt with the rows in place of its image tokens."""
    embeddings: Tensor = call.arguments["inputs_embeds"]
    places = call.arguments["input_ids"] == call.model.config.vision_config.image_token_id
    joined = torch.cat(rows)
    if int(places.sum()) != len(joined):
        raise ValueError(f"input_ids: {int(places.sum())} image tokens, but the images have {len(joined)} rows")
    return embeddings.masked_scatter(places[..., None], joined.to(embeddings))
