"""Towers that transformers has no classes for, written down from their authors' modelling code."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from reference import Alone, Array, stored

Turned = Callable[[Tensor], Tensor]


class Published(Alone):
    """A checkpoint's own weights and settings, by their published names."""

    def __init__(self, checkpoint: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        self.settings = json.loads((checkpoint / "config.json").read_text())
        self.dtype, self.device = dtype, device
        self._weights = {name: tensor.to(device, dtype) for name, tensor in stored(checkpoint).items()}

    def weight(self, name: str) -> Tensor:
        """A weight."""
        return self._weights[name]

    def linear(self, states: Tensor, name: str) -> Tensor:
        """The linear layer of this name."""
        return functional.linear(states, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))

    def norm(self, states: Tensor, name: str, epsilon: float = 1e-6) -> Tensor:
        """The layer norm of this name."""
        weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        return functional.layer_norm(states, states.shape[-1:], weight, bias, epsilon)

    def embedded(self, pixels: Tensor, name: str) -> Tensor:
        """Patches by the convolution of this name, which covers one."""
        kernel = self.weight(f"{name}.weight").flatten(1)
        return functional.linear(pixels.flatten(1), kernel, self.weight(f"{name}.bias"))

    def rms(self, states: Tensor, name: str, epsilon: float) -> Tensor:
        """The norm of this name without a mean, computed in float32."""
        wide = states.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
        return self._weights[f"{name}.weight"] * scaled.to(states.dtype)

    def gated(self, states: Tensor, name: str) -> Tensor:
        """SwiGLU by the names that AIMv2 has."""
        inner = functional.silu(self.linear(states, f"{name}.fc1")) * self.linear(states, f"{name}.fc3")
        return self.linear(inner, f"{name}.fc2")

    def siglip(self, states: Tensor, name: str, vision: dict[str, Any], turned: Turned = torch.clone) -> Tensor:
        """The layers and the last norm of a SigLIP tower, from embedded patches `(patches, C)`."""
        return self.norm(self.siglip_layers(states, name, vision, turned), f"{name}.post_layernorm")

    def siglip_layers(self, states: Tensor, name: str, vision: dict[str, Any], turned: Turned) -> Tensor:
        """The layers alone; queries and keys are `turned` by their places."""
        for layer in range(vision["num_hidden_layers"]):
            own = f"{name}.encoder.layers.{layer}"
            normed = self.norm(states, f"{own}.layer_norm1")
            q, k, v = (self.linear(normed, f"{own}.self_attn.{part}_proj") for part in "qkv")
            mixed = attention(turned(q), turned(k), v, vision["num_attention_heads"])
            states = states + self.linear(mixed, f"{own}.self_attn.out_proj")
            hidden = self.linear(self.norm(states, f"{own}.layer_norm2"), f"{own}.mlp.fc1")
            states = states + self.linear(functional.gelu(hidden, approximate="tanh"), f"{own}.mlp.fc2")
        return states


class MiniCPMV(Published):
    """MiniCPM-V 2.6: huggingface.co/openbmb/MiniCPM-V-2_6, modeling_navit_siglip.py and resampler.py.

    4.0 and 4.5 compute single images in the same way (4.5 adds positions in time for groups of frames).
    """

    @torch.inference_mode()
    def item(self, grid: tuple[int, int, int], pixels: Tensor, crops: Tensor | None = None) -> Array:
        """The embedding of one slice."""
        assert crops is None
        assert grid[0] == 1
        states = self._tower(torch.as_tensor(pixels).to(self.device, self.dtype), *grid[1:])
        return self._resampled(states, *grid[1:]).float().cpu().numpy()

    def _tower(self, pixels: Tensor, height: int, width: int) -> Tensor:
        vision = self.settings["vision_config"]
        embedded = self.embedded(pixels, "vpm.embeddings.patch_embedding")
        states = embedded + self.weight("vpm.embeddings.position_embedding.weight")[self._positions(height, width)]
        return self.siglip(states, "vpm", vision)

    def _positions(self, height: int, width: int) -> Tensor:
        """Shares of the image's sides, sorted into as many buckets as the table of positions has."""
        vision = self.settings["vision_config"]
        side = vision["image_size"] // vision["patch_size"]
        edges = torch.arange(1 / side, 1.0, 1 / side)
        sizes = torch.tensor([height, width], dtype=torch.int32)
        down, across = (torch.bucketize(torch.arange(0, 1 - 1e-6, 1 / n), edges, right=True) for n in sizes)
        places: Tensor = (down[:, None] * side + across).flatten()
        return places

    def _resampled(self, states: Tensor, height: int, width: int) -> Tensor:
        columns = self.settings["hidden_size"]
        values = self.norm(self.linear(states, "resampler.kv_proj"), "resampler.ln_kv")
        places = torch.stack(torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")).flatten(1)
        down, across = (self._waves(axis, columns // 2) for axis in places)
        keys = values + torch.cat([across, down], dim=-1).to(values)
        weights = self.weight("resampler.attn.in_proj_weight").chunk(3)
        biases = self.weight("resampler.attn.in_proj_bias").chunk(3)
        queries = self.norm(self.weight("resampler.query"), "resampler.ln_q")
        q, k, v = (functional.linear(*each) for each in zip((queries, keys, values), weights, biases, strict=True))
        mixed = self.linear(attention(q, k, v, columns // 128), "resampler.attn.out_proj")
        return self.norm(mixed, "resampler.ln_post") @ self.weight("resampler.proj")

    @staticmethod
    def _waves(places: Tensor, width: int) -> Tensor:
        frequencies = 1.0 / 10000 ** (torch.arange(width // 2).float() / (width / 2.0))
        angles = places[:, None].float() * frequencies
        return torch.cat([angles.sin(), angles.cos()], dim=-1)


class PublishedTiles(Published):
    """One that computes each tile `(C, H, W)` alone."""

    @torch.inference_mode()
    def item(self, grid: tuple[int, int, int], pixels: Tensor, crops: Tensor | None = None) -> Array:
        """The rows of one image's tiles `(tiles, C, H, W)`."""
        del grid
        assert crops is None
        tiles = [self._rows(tile) for tile in pixels.to(self.device, self.dtype)]
        return torch.cat(tiles).float().cpu().numpy()

    def _rows(self, tile: Tensor) -> Tensor:
        raise NotImplementedError


class Eagle(PublishedTiles):
    """github.com/NVlabs/Eagle, Eagle2_5/eaglevl/model/eagle2_5/modeling_eagle2_5_vl.py: `extract_feature`."""

    def _rows(self, tile: Tensor) -> Tensor:
        vision, name = self.settings["vision_config"], "vision_model.vision_model"
        kernel, bias = (self.weight(f"{name}.embeddings.patch_embedding.{part}") for part in ("weight", "bias"))
        patches = functional.conv2d(tile[None], kernel, bias, stride=vision["patch_size"])
        _, columns, side, _ = patches.shape
        states = patches[0].flatten(1).T + self.weight(f"{name}.embeddings.position_embedding.weight")
        states = self.siglip(states, name, vision)
        scale = self.settings["downsample_ratio"]
        short = int(side * scale)
        x = states.view(1, side, short, int(columns / scale)).permute(0, 2, 1, 3).contiguous()
        x = x.view(1, short, short, int(columns / scale**2)).permute(0, 2, 1, 3).reshape(short * short, -1)
        hidden = self.linear(self.norm(x, "mlp1.0", 1e-5), "mlp1.1")
        return self.linear(functional.gelu(hidden), "mlp1.3")


class DeepseekVL2(PublishedTiles):
    """github.com/deepseek-ai/DeepSeek-VL2, deepseek_vl2/models: siglip_vit.py and modeling_deepseek_vl_v2.py.

    The rows of each tile, before `prepare_inputs_embeds` puts line breaks and a separator between them.
    """

    def _rows(self, tile: Tensor) -> Tensor:
        vision = self.settings["vision_config"]
        kernel, bias = (self.weight(f"vision.patch_embed.proj.{name}") for name in ("weight", "bias"))
        patches = functional.conv2d(tile[None], kernel, bias, stride=vision["patch_size"])
        states = patches[0].flatten(1).T + self.weight("vision.pos_embed")[0]
        for block in range(vision["layers"]):
            own = f"vision.blocks.{block}"
            q, k, v = self.linear(self.norm(states, f"{own}.norm1"), f"{own}.attn.qkv").chunk(3, dim=-1)
            states = states + self.linear(attention(q, k, v, vision["heads"]), f"{own}.attn.proj")
            hidden = self.linear(self.norm(states, f"{own}.norm2"), f"{own}.mlp.fc1")
            states = states + self.linear(functional.gelu(hidden, approximate="tanh"), f"{own}.mlp.fc2")
        return self._projected(self.norm(states, "vision.norm"))

    def _projected(self, states: Tensor) -> Tensor:
        """Zeros beyond odd sides, then `unfold`, whose columns are by channel first."""
        ratio, side = self.settings["projector_config"]["downsample_ratio"], round(len(states) ** 0.5)
        spare = (ratio - side % ratio) % ratio
        grid = functional.pad(states.T.view(1, -1, side, side), (0, spare, 0, spare))
        squares = functional.unfold(grid, kernel_size=ratio, stride=ratio)[0].T
        return self.linear(functional.gelu(self.linear(squares, "projector.layers.0")), "projector.layers.2")


def attention(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """Full attention of rows `(rows, columns)`, its softmax in float32."""
    query, key, value = (x.unflatten(-1, (heads, -1)).transpose(0, 1) for x in (q, k, v))
    scores = query @ key.transpose(1, 2) * query.shape[-1] ** -0.5
    rows: Tensor = (scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ value).transpose(0, 1).flatten(1)
    return rows


PUBLISHED: dict[str, type[MiniCPMV | DeepseekVL2 | Eagle]] = {
    "minicpmv": MiniCPMV,
    "minicpmo": MiniCPMV,
    "deepseek_vl_v2": DeepseekVL2,
    "eagle_2_5_vl": Eagle,
}
"""By `model_type`."""
