"""C-RADIO (NVIDIA), alone and as the tower of Nemotron Omni, which takes images of any size; Cosmos 3 Edge."""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from vitwire_server.core.grids import Grid
from vitwire_server.core.models import Geometry
from vitwire_server.core.pooling import Pooling
from vitwire_server.towers.configs import Config, Served, changed, dtype_of, new_config, require
from vitwire_server.towers.family import Accepts, Parts, Pool, Pooler, in_model, of_transformers, stripped
from vitwire_server.towers.layouts.packed import PackedFamily, PackedTower
from vitwire_server.towers.layouts.patches import neighbours, taps
from vitwire_server.towers.layouts.plain import PlainEncoder, PlainFamily
from vitwire_server.towers.layouts.raster import RasterFamily, RasterTower
from vitwire_server.towers.layouts.tiles import TileFamily
from vitwire_server.towers.metadata import Kind, Rows, Sources
from vitwire_server.towers.processors.settings import CLIP, IDENTITY, AreaRule, images, unsized
from vitwire_server.towers.shared.fused import unfused
from vitwire_server.towers.shared.learned import TAPPED, fix_positions
from vitwire_server.towers.shared.parts import part, projector, stock, variant
from vitwire_server.towers.shared.pooling import MEAN
from vitwire_server.towers.shared.projected_tiles import MLP1, SHUFFLED, Shuffled, shuffles
from vitwire_server.towers.tower import Metadata

_NAMES = (
    (r"^model\.patch_generator\.video_embedder\.", "embeddings.video_patch_projection."),
    (r"^model\.patch_generator\.embedder\.", "embeddings.patch_projection."),
    (r"^model\.patch_generator\.pos_embed$", "embeddings.position_embedding"),
    (r"^model\.patch_generator\.cls_token\.token$", "embeddings.cls_register_token"),
    (r"^model\.blocks\.", "encoder.layer."),
    (r"\.attn\.proj\.", ".attention.o_proj."),
)
"""NVIDIA's names within `radio_model.`, and transformers'."""
_NAMED = re.compile(r"vit_(?P<size>[a-z0-9]+(_v2)?)_patch(?P<patch>\d+)(_v2)?_224")
_SIZES = {
    "tiny": (192, 12, 3, 4 * 192),
    "small": (384, 12, 6, 4 * 384),
    "base": (768, 12, 12, 4 * 768),
    "large": (1024, 24, 16, 4 * 1024),
    "so400m": (1152, 27, 16, 4304),
    "so400m_v2": (1152, 27, 16, 4320),
    "huge": (1280, 32, 16, 4 * 1280),
    "giant": (1536, 40, 24, 4 * 1536),
}
"""Width, layers, heads and width of the MLP, by names in NVIDIA's code."""
_RATIO = Served("downsample_ratio", shuffles, SHUFFLED)
_SQUARE = Served("projector_hidden_size", lambda inner, own: inner == own.text_config.hidden_size, "a row's columns")
_USUAL = {"weight_init": "skip"}
"""Options of a model that do not change its rows."""
_EDGE_NAMES = (
    (r"\.mlp\.up_proj\.", ".mlp.fc1."),
    (r"\.mlp\.down_proj\.", ".mlp.fc2."),
    (r"\.self_attn\.to_([qkv])\.", r".self_attn.\1_proj."),
)
"""Names that transformers writes for Edge's tower, as the published ones of its language model, and those it reads."""


class Radio(PlainEncoder):
    """Positions cropped out of a resampled square, computed once for the processor's tile.

    The tower normalises pixels itself: its processor only scales them.
    """

    @torch.no_grad()
    def __init__(self, family: PlainFamily, parts: Parts, config: Config) -> None:
        super().__init__(family, parts, config)
        embeddings = self._tower.embeddings
        grid = (self.tile.height // self.patch, self.tile.width // self.patch)
        table = embeddings.position_embedding
        resampled = embeddings._interpolate_position_embedding(grid, table.dtype)  # noqa: SLF001 - the stock function
        fix_positions(embeddings, resampled, "position_embedding", "_interpolate_position_embedding")


def _summary(parts: Parts, _: Config) -> Pool:
    """The class tokens that the model's summary consists of, side by side."""
    tower = parts["tower"]
    width = len(tower.summary_idxs) * tower.config.hidden_size
    return Pool(width, lambda leading, _: leading.index_select(1, tower.summary_idxs).flatten(1))


def _config(folder: Path, settings: Mapping[str, Any]) -> Config:
    """Versions 2 and 3 were published with the arguments of NVIDIA's code as configuration."""
    if settings.get("model_type"):
        return of_transformers(folder, settings)
    args = settings["args"]
    named = _NAMED.fullmatch(str(args["model"]))
    if not named or named["size"] not in _SIZES:
        known = ", ".join(_SIZES)
        raise ValueError(f"args.model is {args['model']!r}, but must be vit_SIZE_patchN_224, of the sizes {known}")
    steps = {f"args.{key}": args.get(key) for key in ("model_kwargs", "model_norm")}
    steps |= {key: settings.get(key) for key in ("feature_normalizer_config", "vitdet_window_size")}
    for field, value in steps.items():
        if value and value != _USUAL:
            raise ValueError(f"{field} is {value!r}, but must be empty")
    width, layers, heads, inner = _SIZES[named["size"]]
    teachers, multiple = args["teachers"], args.get("register_multiple") or 0
    tokens = len({teacher["name"] for teacher in teachers}) if args.get("cls_token_per_teacher") else 1
    patch = int(named["patch"])
    return new_config(
        "radio",
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        mlp_ratio=inner / width,
        patch_size=patch,
        max_img_size=round(args["cpe_max_size"] / patch) * patch,
        num_cls_tokens=tokens,
        num_registers=args.get("cpe_num_registers") or (multiple - tokens % multiple if multiple else 0),
        summary_idxs=[at for at, teacher in enumerate(teachers) if teacher.get("use_summary", True)],
        dtype=dtype_of(settings),
    )


def _nano_config(folder: Path, settings: Mapping[str, Any]) -> Config:
    """From InternVL's fields around a tower with the arguments of NVIDIA's code."""
    require("ps_version", settings.get("ps_version"), "v2")
    tower = {**_config(folder, settings["vision_config"]).to_dict(), "image_size": settings["force_image_size"]}
    text = {"model_type": "qwen2", "hidden_size": settings["llm_config"]["hidden_size"]}
    config = new_config(
        "llava", vision_config=tower, text_config=text, vision_feature_layer=-1, dtype=dtype_of(settings)
    )
    return changed(config, {name: settings[name] for name in ("downsample_ratio", "projector_hidden_size")})


class RadioTower(RasterTower):
    """Positions cropped out of a resampled square; each frame's sequence is its learned rows, then its patches."""

    def __init__(self, family: RasterFamily, parts: Parts, config: Config) -> None:
        super().__init__(family, parts, config)
        normed = config.text_config.num_nextn_predict_layers > 0
        # The layer norm that follows the tower of models which predict ahead has no weights of its own.
        self._eps: float | None = config.vision_config.layer_norm_eps if normed else None

    def _geometry(self, config: Config) -> Geometry:
        return replace(super()._geometry(config), merge=round(1 / config.downsample_ratio))

    def _inputs(self) -> dict[str, Kind]:
        return {**TAPPED, "neighbours": Sources(self.geometry.merge**2)}

    def _compute(self, grid: Grid) -> dict[str, Tensor]:
        side = max(grid.h, grid.w)
        square = taps(side, side, self.model.embeddings.max_rows)
        indices, weights = (
            own.view(side, side, -1)[: grid.h, : grid.w].flatten(0, 1).repeat(grid.t, 1) for own in square
        )
        return {
            **super()._compute(grid),
            "interp_indices": indices,
            "interp_weights": weights,
            "neighbours": neighbours(grid, self.geometry.merge),
        }

    def _rows(self, pixels: Tensor, tensors: Mapping[str, Tensor], attended: Mapping[str, Any]) -> Tensor:
        embeddings = self.model.embeddings
        patches, first = embeddings.patch_projection(pixels), embeddings.cls_register_token
        taken = embeddings.position_embedding[0].float()[tensors["interp_indices"]]
        patches = patches + (taken * tensors["interp_weights"][:, :, None]).sum(1).to(patches.dtype)
        ends, places = _sequences(tensors["cu_seqlens"], len(patches), len(first))
        frames = len(ends) - 1
        states = patches.new_empty((len(patches) + frames * len(first), patches.shape[1]))
        starts = ends[:-1, None] + torch.arange(len(first), device=ends.device)
        states = states.index_copy(0, starts.flatten(), first.repeat(frames, 1)).index_copy(0, places, patches)
        states = states.unsqueeze(0)
        for layer in self.model.encoder.layer:
            states = layer(states, cu_seqlens=ends.int(), max_seqlen=attended["max_length_q"] + len(first))
        features = states[0, places]
        if self._eps is not None:
            features = functional.layer_norm(features, features.shape[-1:], eps=self._eps)
        return self._projector(features[tensors["neighbours"]].flatten(1))  # type: ignore[no-any-return]


def _sequences(ends: Tensor, patches: int, first: int) -> tuple[Tensor, Tensor]:
    """Ends of the frames' sequences, which begin with `first` rows each, and the places of the patches in them."""
    frames = torch.arange(len(ends), device=ends.device)
    numbers = torch.arange(patches, dtype=ends.dtype, device=ends.device)
    own = torch.searchsorted(ends[1:], numbers, right=True)
    return ends.long() + first * frames, numbers + first * (own + 1)


class EdgeTower(PackedTower):
    """Learned positions, resampled to each grid on the host, as antialiasing has no taps; patches are `(p, p, C)`."""

    def __init__(self, family: PackedFamily, parts: Parts, config: Config) -> None:
        super().__init__(family, parts, config)
        self.geometry = replace(self.geometry, channels_last=True)
        self._table = self.model.embeddings.position_embedding.weight.detach().cpu()

    def _inputs(self) -> dict[str, Kind]:
        return {"positions": Rows((self._table.shape[1],), self._table.dtype)}

    def _compute(self, grid: Grid) -> dict[str, Tensor]:
        embeddings = self.model.embeddings
        side = embeddings.position_embedding_size
        table, grids = self._table.view(side, side, -1), torch.tensor([grid])
        positions = embeddings.resize_positional_embeddings(table, grids, self.geometry.merge)
        return {**self._ends(grid), "positions": positions}

    def forward(self, pixels: Tensor, metadata: Metadata) -> Tensor:
        model, tensors = self.model, metadata.tensors
        states = model.embeddings.patch_embedding(pixels) + tensors["positions"]
        states = model.encoder(states, None, cu_seqlens=tensors["cu_seqlens"], **metadata.bounds)
        rows: Tensor = self.head.projector(model.post_layernorm(states))
        return rows


_unfused = unfused(".attn.qkv.", ".attention.{}_proj.")

_OMNI = RasterFamily(
    "nemotron_h_omni",
    "Nemotron 3 Omni",
    tower=stock(
        "vitwire_server.towers.models.subclasses:Radio",
        stripped("vision_model.radio_model.", "vision_model."),
        renames=_NAMES,
        ignored=("input_conditioner.",),
        convert=_unfused,
    ),
    beside=projector(
        "nemotron_h_omni.NemotronH_Omni_Reasoning_V3MultiModalProjector",
        {"multi_modal_projector.": "", **MLP1},
        arguments=lambda config: (
            config.vision_config.hidden_size * round(1 / config.downsample_ratio) ** 2,
            config.projector_hidden_size,
            config.text_config.hidden_size,
        ),
        served=(_RATIO,),
    ),
    forward=RadioTower,
    layers="encoder.layer",
    processor=images(
        lambda image, _: unsized(
            {"image_mean": image.get("norm_mean"), "image_std": image.get("norm_std"), **image}, CLIP
        )
    ),
    images=Accepts.PIXELS,
    transformers="5.23.0",
)
_NANO = TileFamily(
    "NemotronH_Nano_VL_V2",
    "Nemotron Nano 2 VL",
    configuration=_nano_config,
    tower=_OMNI.tower,
    beside=_OMNI.beside,
    encoder=partial(Shuffled, merged_by="downsample_ratio", layers="encoder.layer"),
    processor=_OMNI.processor,
    images=Accepts.PIXELS,
    transformers="5.23.0",
)

ROWS = (
    PlainFamily(
        "radio",
        "C-RADIO 2 to 4",
        original="RADIOModel",
        configuration=_config,
        tower=part(
            "radio.RadioModel",
            stripped("radio_model.", ""),
            renames=(*_NAMES, (r"\.ls(\d)\.(gamma|grandma)$", r".layer_scale\1.lambda1")),
            ignored=("adaptors.", "inter_feature_normalizer.", "model.reg_token"),
            convert=_unfused,
        ),
        encoder=Radio,
        layers="encoder.layer",
        leading=lambda config: int(config.num_cls_tokens + config.num_registers),
        resizes=True,
        poolers=(Pooler(pooling=Pooling.CLS, make=_summary), MEAN),
        processor="CLIP",
        transformers="5.23.0",
    ),
    _OMNI,
    _NANO,
    variant(
        _NANO,
        "Llama_Nemotron_Nano_VL",
        "Llama 3.1 Nemotron Nano VL",
        tower=stock("radio.RadioModel", stripped("vision_model.radio_model."), renames=_NAMES, convert=_unfused),
        beside=projector("internvl.InternVLMultiModalProjector", MLP1, served=(_RATIO, _SQUARE)),
        processor=images(lambda image, _: unsized(image, IDENTITY)),
    ),
    PackedFamily(
        "cosmos3_edge",
        "Cosmos 3 Edge",
        video_processor="Cosmos3Edge",
        tower=stock("cosmos3_edge.Cosmos3EdgeVisionModel", in_model("visual."), renames=_EDGE_NAMES),
        beside=projector("cosmos3_edge.Cosmos3EdgePatchMerger", in_model("projector.")),
        forward=EdgeTower,
        layers="encoder.layers",
        image_areas=AreaRule(spans_frames=True),
        video_areas=AreaRule(pixels=(64 * 64, 24 * 1024 * 1024), spans_frames=True),
        transformers="5.23.0",
    ),
)
