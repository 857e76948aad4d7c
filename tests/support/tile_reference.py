"""What transformers makes of tiles."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from math import prod
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING

from reference import Array


class TileReference:
    """Rows of one image's tiles, by the whole model's own `get_image_features`."""

    def __init__(self, checkpoint: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        settings = json.loads((checkpoint / "config.json").read_text())
        self.dtype, self.device = dtype, device
        model_type = _SAME.get(settings["model_type"], settings["model_type"])
        config = CONFIG_MAPPING[model_type].from_dict({**settings, "model_type": model_type})
        auto: Any = getattr(transformers, settings["architectures"][0])
        model = auto.from_pretrained(checkpoint, config=config, dtype=dtype)
        model.eval().to(device)
        own = _FEATURES.get(model_type, _pooled)
        self._features: Callable[[Tensor, Tensor | None], Tensor] = lambda pixels, crops: own(model, pixels, crops)

    @torch.inference_mode()
    def item(self, grid: tuple[int, int, int], pixels: Tensor, crops: Tensor | None = None) -> Array:
        """The embedding `(tokens, width)` of one item: tiles `(tiles, C, H, W)`, and its crops."""
        del grid
        own = [x.to(self.device, self.dtype) if x is not None else None for x in (pixels, crops)]
        rows = self._features(own[0], own[1])  # type: ignore[arg-type]
        return rows.reshape(-1, rows.shape[-1]).float().cpu().numpy()


def _pooled(model: Any, pixels: Tensor, crops: Tensor | None) -> Tensor:
    assert crops is None
    owner = _owner(model)
    return owner.get_image_features(pixel_values=pixels).pooler_output  # type: ignore[no-any-return]


def _owner(model: Any) -> Any:
    """The part with the tower: of a model that generates or classifies, of one that retrieves, or all of it."""
    parts = (getattr(model, name, None) for name in ("vlm", "model"))
    return next((own for own in parts if hasattr(own, "get_image_features")), model)


def _hybrid(model: Any, pixels: Tensor, crops: Tensor | None) -> Tensor:
    return model.model.get_image_features(pixels, crops).pooler_output  # type: ignore[no-any-return]


def _cropped(model: Any, pixels: Tensor, crops: Tensor | None) -> Tensor:
    counts = [0 if crops is None else len(crops)]
    (rows,) = model.model.get_image_features(pixels, crops, counts).pooler_output
    return rows  # type: ignore[no-any-return]


def _listed(model: Any, pixels: Tensor, crops: Tensor | None) -> Tensor:
    assert crops is None
    return torch.cat(model.model.get_image_features(pixel_values=pixels).pooler_output)


def _unbroken(model: Any, pixels: Tensor, crops: Tensor | None) -> Tensor:
    """As its `get_image_features` does before it puts a line break behind each line."""
    inner = model.model
    views = [view for view in (crops, pixels) if view is not None and len(view)]
    rows = [inner.multi_modal_projector(inner.vision_tower(view).last_hidden_state).flatten(0, 1) for view in views]
    return torch.cat([*rows, inner.view_separator[None]])


@contextmanager
def _unpacked(inner: Any) -> Iterator[list[Tensor]]:
    """What `get_image_features` would pack, with a `pack_image_features` that only keeps it."""
    given: list[Tensor] = []

    def keep(features: list[Tensor], *_: Any, **__: Any) -> tuple[None, None]:
        given.extend(features)
        return None, None

    inner.pack_image_features = keep
    try:
        yield given
    finally:
        del inner.pack_image_features


def _onevision(model: Any, pixels: Tensor, crops: Tensor | None) -> Tensor:
    """As its `get_image_features` does before it packs."""
    del crops
    size = model.config.vision_config.image_size
    with _unpacked(model.model) as given:
        sizes = torch.tensor([[size, size]] * len(pixels))
        model.model.get_image_features(pixels, image_sizes=sizes, batch_num_images=[len(pixels) + 1] * len(pixels))
    return torch.cat(given)


def rows_of_tiles(model: Any, pixels: Tensor, crops: Tensor | None) -> Tensor:
    """Of LLaVA-NeXT, as `_onevision`; each tile stands for an image that is cut in the fewest."""
    del crops
    smallest = min(model.config.image_grid_pinpoints, key=prod)
    count = 1 + prod(smallest) // model.config.vision_config.image_size**2
    with _unpacked(model.model) as given:
        model.model.get_image_features(pixels.repeat_interleave(count, dim=0), torch.tensor([smallest] * len(pixels)))
    return torch.stack(given)[:, 0]


def _nested(model: Any, pixels: Tensor, crops: Tensor | None) -> Tensor:
    """Asked for the tiles of one prompt. 5.17 gives rows of each tile, 5.23 those of each prompt."""
    assert crops is None
    return torch.cat(list(_owner(model).get_image_features(pixel_values=pixels[None]).pooler_output))


def _deepstacked(model: Any, pixels: Tensor, crops: Tensor | None) -> Tensor:
    """Asked for the tiles of one prompt, whose rows come for several layers."""
    assert crops is None
    mask = torch.ones(1, len(pixels), dtype=torch.bool, device=pixels.device)
    output = model.model.get_image_features(pixels[None], mask)
    return torch.cat([own for (own,) in (output.pooler_output, *output.deepstack_features)], dim=-1)


def _llama4(model: Any, pixels: Tensor, crops: Tensor | None) -> Tensor:
    del crops
    # 5.17 asks for a strategy, which this tower has only one of.
    wanted = signature(model.get_image_features).parameters.keys() & {"vision_feature_select_strategy"}
    features = model.get_image_features(pixel_values=pixels, **dict.fromkeys(wanted, "default")).last_hidden_state
    return model.multi_modal_projector(features.reshape(-1, features.shape[-1]))  # type: ignore[no-any-return]


_FEATURES: dict[str, Callable[[Any, Tensor, Tensor | None], Tensor]] = {
    "llava": _listed,
    "llava_next": rows_of_tiles,
    "llava_onevision": _onevision,
    "llama4": _llama4,
    "deepseek_vl_hybrid": _hybrid,
    "granite_docling": _deepstacked,
    **dict.fromkeys(("idefics3", "smolvlm", "modernvbert", "colmodernvbert", "ultravbert"), _nested),
    **dict.fromkeys(("step3p7", "deepseek_ocr2"), _cropped),
    "unlimited_ocr": _unbroken,
}


_SAME = {"step3_vl": "step3p7", "step_robotics": "step3p7", "step5_vl": "step3p7"}
"""Models that transformers has under another name only."""
