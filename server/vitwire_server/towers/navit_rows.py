"""Rows of towers that take packed patches without `grid_thw`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isqrt
from pathlib import Path
from typing import Any

from vitwire_server.core.items import Modality
from vitwire_server.core.models import Preprocessing, Resizing
from vitwire_server.towers.family import Family, Module, in_model, last_layer, stripped
from vitwire_server.towers.layouts.raster import Gemma4Tower, NavitFamily, PixtralTower, Siglip2Tower
from vitwire_server.towers.processors.settings import BICUBIC, BILINEAR, CLIP, HALF, Normalisation, Processor, bounded, square
from vitwire_server.towers.served import Served

_IDENTITY = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
_TOWER = in_model("vision_tower.")
_PROJECTOR = in_model("multi_modal_projector.")
_GEMMA4_TOKENS = {Modality.IMAGE: 280, Modality.VIDEO: 70}
_SIGLIP2_PATCHES = 256


def _settings(
    config: Mapping[str, Any],
    most: int,
    factor: int,
    resizing: Resizing,
    normalisation: Normalisation,
    resample: int = BICUBIC,
) -> Preprocessing:
    """Settings of images of at most `most` pixels whose sides are multiples of `factor`."""
    if not config.get("do_normalize", normalisation is not _IDENTITY):
        config, normalisation = {**config, "image_mean": None, "image_std": None}, _IDENTITY
    return replace(bounded(config, (factor**2, most), normalisation, resample), resizing=resizing)


# -- Pixtral -----------------------------------------------------------------------------------------


def _pixtral_settings(files: Processor, config: Any) -> dict[Modality, Preprocessing]:  # noqa: ANN401
    longest = square(files.image)
    factor = config.vision_config.patch_size * getattr(config, "spatial_merge_size", 1)
    if longest < factor:
        raise ValueError(f"size {longest} is less than one token of {factor} pixels")
    return {Modality.IMAGE: _settings(files.image, longest**2, factor, Resizing.LONGEST_SIDE, CLIP)}


@dataclass(frozen=True, kw_only=True)
class PixtralFamily(NavitFamily):
    """Checkpoints of which only those with Pixtral's tower are served."""

    def read_config(self, folder: Path, settings: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """See Family. Raises ValueError over another tower."""
        config = super().read_config(folder, settings)
        if config.vision_config.model_type != "pixtral":
            raise ValueError(f"its tower is {config.vision_config.model_type}, only Pixtral's is served")
        last_layer(config)
        return config


_PIXTRAL = PixtralFamily(
    model_type="llava",
    title="Pixtral",
    architecture="24 x 1024, patch 16",
    tower=Module(source="pixtral.modeling_pixtral:PixtralVisionModel", prefixes=_TOWER),
    beside={
        "projector": Module(
            source="llava.modeling_llava:LlavaMultiModalProjector",
            prefixes=_PROJECTOR,
            config="",
            served=(Served("vision_feature_select_strategy", lambda strategy, _: strategy == "full", "'full'"),),
        )
    },
    width="text_config.hidden_size",
    adapter=PixtralTower,
    layers="transformer.layers",
    processor=_pixtral_settings,
    videos=False,
    special="LLaVA's layout with Pixtral's tower",
)
_MISTRAL3 = PixtralFamily(
    model_type="mistral3",
    title="Mistral Small 3.1",
    architecture="24 x 1024, patch 14",
    tower=_PIXTRAL.tower,
    beside={
        "projector": Module(
            source="mistral3.modeling_mistral3:Mistral3MultiModalProjector", prefixes=_PROJECTOR, config=""
        )
    },
    width="text_config.hidden_size",
    adapter=PixtralTower,
    merge="spatial_merge_size",
    layers="transformer.layers",
    processor=_pixtral_settings,
    videos=False,
)


# -- Gemma 4 -----------------------------------------------------------------------------------------


def _gemma4_settings(files: Processor, config: Any) -> dict[Modality, Preprocessing]:  # noqa: ANN401
    vision = config.vision_config
    factor = vision.patch_size * vision.pooling_kernel_size

    def of(modality: Modality, own: Mapping[str, Any]) -> Preprocessing:
        tokens = int(own.get("max_soft_tokens", _GEMMA4_TOKENS[modality]))
        return _settings(own, tokens * factor**2, factor, Resizing.MOST_TOKENS, _IDENTITY)

    return {Modality.IMAGE: of(Modality.IMAGE, files.image), Modality.VIDEO: of(Modality.VIDEO, files.own_video)}


@dataclass(frozen=True, kw_only=True)
class Gemma4Family(NavitFamily):
    """Gemma 4, whose attention is served with as many keys as queries."""

    def read_config(self, folder: Path, settings: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """See Family. Raises ValueError over grouped queries."""
        config = super().read_config(folder, settings)
        vision = config.vision_config
        if vision.num_key_value_heads != vision.num_attention_heads:
            raise ValueError("a vision tower with grouped queries is not served")
        return config


_GEMMA4 = Gemma4Family(
    model_type="gemma4",
    title="Gemma 4",
    architecture="16 x 768, patch 16",
    tower=Module(source="gemma4.modeling_gemma4:Gemma4VisionModel", prefixes=_TOWER),
    beside={
        "projector": Module(
            source="vitwire_server.towers.models.gemma_projector:Embedder",
            prefixes=in_model("embed_vision."),
            config="",
        )
    },
    width="text_config.hidden_size",
    adapter=Gemma4Tower,
    merge="vision_config.pooling_kernel_size",
    channels_last=True,
    layers="encoder.layers",
    processor=_gemma4_settings,
    special="a frame is an image of fewer tokens",
)


# -- SigLIP 2 NaFlex ---------------------------------------------------------------------------------


def _siglip2_settings(files: Processor, config: Any) -> dict[Modality, Preprocessing]:  # noqa: ANN401
    patch = config.vision_config.patch_size
    most = int(files.image.get("max_num_patches", _SIGLIP2_PATCHES))
    return {Modality.IMAGE: _settings(files.image, most * patch**2, patch, Resizing.MOST_PATCHES, HALF, BILINEAR)}


@dataclass(frozen=True, kw_only=True)
class Siglip2Family(NavitFamily):
    """SigLIP 2, whose pooling head is left out."""

    def read_config(self, folder: Path, settings: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """See Family. Raises ValueError over a table of positions that is no square."""
        config = super().read_config(folder, settings)
        vision = config.vision_config
        if isqrt(vision.num_patches) ** 2 != vision.num_patches:
            raise ValueError(f"{vision.num_patches} positions are no square")
        vision.vision_use_head = False
        return config


_SIGLIP2 = Siglip2Family(
    model_type="siglip2",
    title="SigLIP 2 NaFlex",
    architecture="12 x 768 or 27 x 1152, patch 16",
    tower=Module(
        source="siglip2.modeling_siglip2:Siglip2VisionModel",
        prefixes=stripped("vision_model."),
        ignored=("head.",),
    ),
    width="vision_config.hidden_size",
    adapter=Siglip2Tower,
    converts=False,
    channels_last=True,
    layers="encoder.layers",
    processor=_siglip2_settings,
    videos=False,
    special="rows of the patches, without the pooling head",
)

NAVIT_ROWS: tuple[Family, ...] = (_PIXTRAL, _MISTRAL3, _GEMMA4, _SIGLIP2)
