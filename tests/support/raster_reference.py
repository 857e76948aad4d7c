"""What transformers makes of packed patches without `grid_thw`, each image alone."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from reference import Alone, Array
from vitwire_server.core.pooling import Pooling


class RasterReference(Alone):
    """The whole model of a checkpoint, stock, asked as its own processor's output would be."""

    def __init__(self, checkpoint: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        settings = json.loads((checkpoint / "config.json").read_text())
        model: Any = getattr(transformers, settings["architectures"][0]).from_pretrained(checkpoint, dtype=dtype)
        self.model = model.eval().to(device)
        self.dtype = dtype
        self.patch: int = getattr(model.config.vision_config, "patch_size", 0)

    @torch.inference_mode()
    def item(self, grid: tuple[int, int, int], pixels: Tensor, crops: Tensor | None = None) -> Array:
        """The embedding of one item."""
        assert crops is None
        frames = torch.as_tensor(pixels).to(self.model.device, self.dtype).unflatten(0, (grid[0], -1))
        return self.rows(frames, grid[1], grid[2]).float().cpu().numpy()

    def rows(self, frames: Tensor, height: int, width: int) -> Tensor:
        """Rows of frames `(t, h*w, columns)`, one after the other."""
        raise NotImplementedError


class Pixtral(RasterReference):
    """Asked for images put together of the patches; for two, as one of a single token fails in transformers."""

    def rows(self, frames: Tensor, height: int, width: int) -> Tensor:
        side = self.patch
        image = frames.view(1, height, width, 3, side, side).permute(0, 3, 1, 4, 2, 5)
        sizes = torch.tensor([[height * side, width * side]] * 2)
        features = self.model.model.get_image_features(
            pixel_values=image.reshape(1, 3, height * side, width * side).repeat(2, 1, 1, 1), image_sizes=sizes
        )
        rows, _ = features.pooler_output
        return rows  # type: ignore[no-any-return]


class Gemma4(RasterReference):
    """Asked for rows of patches with their columns and rows."""

    def rows(self, frames: Tensor, height: int, width: int) -> Tensor:
        down, across = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        positions = torch.stack([across.flatten(), down.flatten()], dim=-1).expand(len(frames), -1, -1)
        inner = getattr(self.model, "model", self.model)
        inner = getattr(inner, "encoder", inner)
        features = inner.get_image_features(frames, positions.to(frames.device))
        rows = features.pooler_output
        return rows if isinstance(rows, Tensor) else torch.cat(tuple(rows))


class Siglip2(RasterReference):
    """Asked for rows of patches with their shape; its rows before pooling."""

    def rows(self, frames: Tensor, height: int, width: int) -> Tensor:
        return self._features(frames, height, width).last_hidden_state.flatten(0, 1)  # type: ignore[no-any-return]

    @torch.inference_mode()
    def pooled(self, pooling: Pooling, pixels: Tensor, grid: tuple[int, int, int]) -> Array:
        """One row for each frame."""
        frames = pixels.to(self.model.device, self.dtype).unflatten(0, (grid[0], -1))
        features = self._features(frames, grid[1], grid[2])
        own = features.pooler_output if pooling is Pooling.ATTENTION else features.last_hidden_state.mean(1)
        return own.float().cpu().numpy()  # type: ignore[no-any-return]

    def _features(self, frames: Tensor, height: int, width: int) -> Any:
        mask = torch.ones(frames.shape[:2], dtype=torch.int32, device=frames.device)
        shapes = torch.tensor([[height, width]] * len(frames))
        return self.model.get_image_features(frames, mask, shapes)


class Lfm2Vl(RasterReference):
    """Asked for rows of patches with their shape; what it hands its LLM."""

    def rows(self, frames: Tensor, height: int, width: int) -> Tensor:
        mask = torch.ones(frames.shape[:2], dtype=torch.int32, device=frames.device)
        shapes = torch.tensor([[height, width]] * len(frames))
        features = self.model.model.get_image_features(frames, spatial_shapes=shapes, pixel_attention_mask=mask)
        return torch.cat(list(features.pooler_output))


class Idefics2(RasterReference):
    """Asked for images put together of the patches, of one prompt."""

    def rows(self, frames: Tensor, height: int, width: int) -> Tensor:
        side = self.patch
        image = frames.view(1, height, width, 3, side, side).permute(0, 3, 1, 4, 2, 5)
        pixels = image.reshape(1, 1, 3, height * side, width * side)
        rows = self.model.model.get_image_features(pixels).pooler_output
        joined: Tensor = rows if isinstance(rows, Tensor) else torch.cat(rows)  # before 5.23, all prompts in one
        return joined.flatten(0, -2)


class MiniCpm(RasterReference):
    """Asked for one strip of the patches of all frames."""

    def rows(self, frames: Tensor, height: int, width: int) -> Tensor:
        side = self.patch
        patches = frames.reshape(-1, 3, side, side).permute(1, 2, 0, 3)
        sizes = torch.tensor([[height, width]] * len(frames))
        features = self.model.model.get_image_features(patches.reshape(1, 3, side, -1), sizes)
        return torch.cat(features.pooler_output)


class Nemotron(RasterReference):
    """Asked for rows of patches with their sizes."""

    def rows(self, frames: Tensor, height: int, width: int) -> Tensor:
        sizes = torch.tensor([[height, width]] * len(frames), device=frames.device)
        features = self.model.get_image_features(frames.flatten(0, 1), sizes)
        return torch.cat(features.pooler_output)


class Pix2Struct(RasterReference):
    """Asked for rows of patches behind their row and column, which are counted from 1; 9 rows of zeros are padding."""

    def rows(self, frames: Tensor, height: int, width: int) -> Tensor:
        down, across = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        places = 1 + torch.stack([down.flatten(), across.flatten()], dim=-1).to(frames)
        flattened = torch.cat([places[None], frames], dim=-1)
        mask = torch.ones(1, height * width + 9, device=frames.device)
        mask[:, height * width :] = 0
        padded = torch.nn.functional.pad(flattened, (0, 0, 0, 9))
        return self.model.encoder(padded, mask).last_hidden_state[0, : height * width]  # type: ignore[no-any-return]


class Hunyuan(RasterReference):
    """Asked for rows of patches with their grid; without the rows that its merger adds."""

    def rows(self, frames: Tensor, height: int, width: int) -> Tensor:
        features = self.model.model.get_image_features(frames.flatten(0, 1), torch.tensor([[1, height, width]]))
        lines = features.pooler_output[0][1:-1].unflatten(0, (height // 2, -1))
        rows: Tensor = lines[:, :-1].flatten(0, 1)
        return rows


RASTER = {
    "hunyuan_vl": Hunyuan,
    "pix2struct": Pix2Struct,
    "nemotron_h_omni": Nemotron,
    **dict.fromkeys(("minicpmv4_6", "minicpmv4_7", "minicpm_ocr"), MiniCpm),
    **dict.fromkeys(("llava-pixtral", "mistral3", "mistral_large4", "lighton_ocr"), Pixtral),
    **dict.fromkeys(("gemma4", "diffusion_gemma", "embedding_gemma2"), Gemma4),
    "siglip2": Siglip2,
    "lfm2_vl": Lfm2Vl,
    "idefics2": Idefics2,
}
