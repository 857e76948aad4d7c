"""What transformers makes of an image with a vision transformer that is served alone."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor

from published_reference import InternVL
from reference import Array
from vitwire_server.core.pooling import Pooling

PLAIN = {
    **dict.fromkeys(("clip", "clip_vision_model", "metaclip_2", "chinese_clip", "altclip"), 1),
    **dict.fromkeys(("mlcd", "mlcd_vision_model", "dinov2", "vit", "vit_msn", "vit_mae", "intern_vit_6b"), 1),
    **dict.fromkeys(("siglip", "siglip_vision_model", "ijepa", "aimv2_vision_model", "aimv2"), 0),
    "dinov2_with_registers": 4,
    "dinov3_vit": 5,
    "deit": 2,
    "radio": 10,
    "tipsv2": 3,
}
"""Tokens before those of the patches in the demo model of each type."""
_UNPOOLED = ("vit", "deit", "vit_msn", "vit_mae")
"""Models that return no class token as it is: ViT has a layer behind it."""


class PlainReference:
    """The whole model of a checkpoint, stock, asked for its last hidden state and for its pooled rows."""

    def __init__(self, checkpoint: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        settings = json.loads((checkpoint / "config.json").read_text())
        if settings["model_type"] == "intern_vit_6b":
            self.model: Any = OriginalInternViT(checkpoint, settings, dtype, device)
        else:
            model = getattr(transformers, settings["architectures"][0]).from_pretrained(checkpoint, dtype=dtype)
            self.model = model.eval().to(device)
            if settings["model_type"] == "vit_mae":
                self.model = Unmasked(model.vit)
        self.dtype, self.device = dtype, device
        self._class_token = settings["model_type"] not in _UNPOOLED
        self._leading = PLAIN[settings["model_type"]]

    def item(self, grid: tuple[int, int, int], pixels: Tensor, crops: Tensor | None = None) -> Array:
        """The rows of the patches of one item, tile after tile."""
        del grid
        assert crops is None
        return self.pooled(Pooling.NONE, pixels)

    @torch.inference_mode()
    def pooled(self, pooling: Pooling, pixels: Tensor, grid: tuple[int, int, int] = (1, 1, 1)) -> Array:
        """The rows of tiles, pooled or not."""
        del grid
        given = pixels.to(self.device, self.dtype)
        features = getattr(self.model, "get_image_features", self.model)
        output = features(pixel_values=given)
        patches = output.last_hidden_state[:, self._leading :]
        rows = {
            Pooling.NONE: lambda: patches.flatten(0, 1),
            Pooling.MEAN: lambda: patches.mean(1),
            Pooling.CLS: lambda: self._own(output) if self._class_token else output.last_hidden_state[:, 0],
            Pooling.ATTENTION: lambda: self._own(output),
        }[pooling]()
        return rows.float().cpu().numpy()  # type: ignore[no-any-return]

    def _own(self, output: Any) -> Any:
        """What the model itself pools: projected by those that have a projection, a summary of several class tokens."""
        found = (getattr(output, name, None) for name in ("image_embeds", "summary"))
        return next((own for own in found if own is not None), getattr(output, "pooler_output", None))


class Unmasked:
    """ViT-MAE's encoder, asked for all patches: none is masked, and noise that rises keeps their order."""

    def __init__(self, encoder: Any) -> None:
        self._encoder = encoder
        encoder.config.mask_ratio = 0.0

    def __call__(self, pixel_values: Tensor) -> Any:
        patches = self._encoder.embeddings.patch_embeddings.num_patches
        noise = torch.arange(patches, device=pixel_values.device).expand(len(pixel_values), -1)
        return self._encoder(pixel_values, noise=noise)


class OriginalInternViT(InternVL):
    """OpenGVLab's tower alone, whose weights have no prefix."""

    def __init__(self, checkpoint: Path, settings: dict[str, Any], dtype: torch.dtype, device: str) -> None:
        super().__init__(checkpoint, dtype, device)
        self.settings = {"vision_config": settings}
        self._weights = {f"vision_model.{name}": weight for name, weight in self._weights.items()}

    def __call__(self, pixel_values: Tensor) -> Any:
        """What the original returns: the class token is the pooled output."""
        states = torch.stack([self.states(tile) for tile in pixel_values])
        return SimpleNamespace(last_hidden_state=states, pooler_output=states[:, 0])
