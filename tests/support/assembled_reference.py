"""What transformers makes of images whose rows depend on the layout of their tiles, each image alone."""

import json
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Phi4MultimodalConfig,
    Phi4MultimodalForCausalLM,
)
from transformers.models.mllama.image_processing_pil_mllama import (
    build_aspect_ratio_mask_np,
    convert_aspect_ratios_to_ids_np,
)

from reference import Array, stored
from tile_reference import rows_of_tiles


class AssembledReference:
    """The whole model of a checkpoint, stock."""

    def __init__(self, checkpoint: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        self.dtype, self.device = dtype, device
        self.model: Any = self.load(checkpoint, dtype).eval().to(device)

    def load(self, checkpoint: Path, dtype: torch.dtype) -> Any:
        """The model."""
        return AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=dtype)

    @torch.inference_mode()
    def item(self, grid: tuple[int, int, int], pixels: Tensor, crops: Tensor | None = None) -> Array:
        """The embedding of one item."""
        assert crops is None
        return self.rows(pixels.to(self.device, self.dtype), grid).float().cpu().numpy()

    def rows(self, tiles: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """Rows of one image."""
        raise NotImplementedError


class Phi4(AssembledReference):
    """What takes the place of an image's tokens, with the masks that its processor makes.

    Attention is eager: through SDPA, tiles without background are attended causally.
    """

    def load(self, checkpoint: Path, dtype: torch.dtype) -> Any:
        return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, attn_implementation="eager")

    def rows(self, tiles: Tensor, grid: tuple[int, int, int]) -> Tensor:
        embed = self.model.model.embed_tokens_extend.image_embed
        _, height, width = grid
        vision = self.model.config.vision_config
        side = vision.image_size // vision.patch_size
        rows, columns = ceil(height / side), ceil(width / side)
        canvas = torch.zeros(rows * side, columns * side)
        canvas[:height, :width] = 1
        crops = canvas.view(rows, side, columns, side).transpose(1, 2).reshape(-1, side, side)
        masks = torch.cat([torch.ones(1, side, side), crops]).to(tiles.device)
        lines = side // 2
        count = ceil(height / 2) * (ceil(width / 2) + 1) + 1 + lines * (lines + 1)
        ids = torch.full((1, count), vision.image_token_id, device=tiles.device)
        places = torch.full(
            (1, count, self.model.config.hidden_size), torch.nan, dtype=tiles.dtype, device=tiles.device
        )
        sizes = torch.tensor([[rows * vision.crop_size, columns * vision.crop_size]])
        return embed(ids, places, tiles[None], sizes, masks[None])[0]  # type: ignore[no-any-return]


class Phi4MM(Phi4):
    """Microsoft's weights under transformers' names."""

    def load(self, checkpoint: Path, dtype: torch.dtype) -> Any:
        settings = json.loads((checkpoint / "config.json").read_text())
        weights = stored(checkpoint)
        embed = "model.embed_tokens_extend.image_embed."
        names = {
            f"{embed}img_projection.0.": f"{embed}img_projection_up.",
            f"{embed}img_projection.2.": f"{embed}img_projection_down.",
            f"{embed}glb_GN": f"{embed}global_img_feature_extensor",
            f"{embed}sub_GN": f"{embed}sub_img_feature_extensor",
        }
        for old, new in names.items():
            weights = {name.replace(old, new): tensor for name, tensor in weights.items()}
        config = Phi4MultimodalConfig(  # type: ignore[call-arg]
            audio_config={"hidden_size": 16, "num_attention_heads": 2, "num_blocks": 1, "nemo_conv_channels": 16},
            hidden_size=settings["hidden_size"],
            num_attention_heads=4,
            num_hidden_layers=0,
            pad_token_id=0,
            vision_config=settings["vision_config"],
            vocab_size=1,
            attn_implementation="eager",
        )
        model = Phi4MultimodalForCausalLM._from_config(config, attn_implementation="eager", dtype=dtype)
        own = model.model.embed_tokens_extend.image_embed
        missing, _ = own.load_state_dict(
            {name.removeprefix(embed): tensor for name, tensor in weights.items() if name.startswith(embed)}
        )
        assert not missing
        return model


class Mllama(AssembledReference):
    """States for cross-attention, of an image's own tiles, by what its processor says of its layout."""

    def rows(self, tiles: Tensor, grid: tuple[int, int, int]) -> Tensor:
        model = self.model.model
        most = model.max_num_tiles
        pixels = tiles.new_zeros(1, 1, most, *tiles.shape[1:])
        own = grid[1] * grid[2]
        pixels[0, 0, :own] = tiles[:own]
        arrays = convert_aspect_ratios_to_ids_np([[grid[1:]]], most), build_aspect_ratio_mask_np([[grid[1:]]], most)
        ids, mask = (torch.from_numpy(each).to(tiles.device) for each in arrays)
        states = model.multi_modal_projector(model.vision_model(pixels, ids, mask).last_hidden_state)
        return states[0, 0, : len(tiles)].flatten(0, 1)  # type: ignore[no-any-return]


class Aria(AssembledReference):
    """What `get_image_features` gives, with the mask of pixels that its processor makes: the margin is left out."""

    def rows(self, tiles: Tensor, grid: tuple[int, int, int]) -> Tensor:
        patch = self.model.config.vision_config.patch_size
        mask = torch.zeros(1, *tiles.shape[2:], dtype=torch.bool, device=tiles.device)
        mask[:, : grid[1] * patch - 5, : grid[2] * patch] = True  # a patch counts if a part of it does
        return self.model.model.get_image_features(tiles, mask).pooler_output[0]  # type: ignore[no-any-return]


class LlavaNextVideo(AssembledReference):
    """Clips by the model's own `get_video_features`, images as LLaVA-NeXT's."""

    def rows(self, tiles: Tensor, grid: tuple[int, int, int]) -> Tensor:
        if grid[1] * grid[2] == 1:
            rows: Tensor = self.model.model.get_video_features(tiles[None]).pooler_output[0]
            return rows.reshape(-1, rows.shape[-1])  # transformers 5.17 has an axis for frames
        return rows_of_tiles(self.model, tiles, None).flatten(0, 1)


ASSEMBLED: dict[str, type[AssembledReference]] = {
    "aria": Aria,
    "llava_next_video": LlavaNextVideo,
    "mllama": Mllama,
    "phi4_multimodal": Phi4,
    "phi4mm": Phi4MM,
}
