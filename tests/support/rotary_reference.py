"""Packed towers with rotary positions that transformers has no classes for, written down from their authors' code."""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from published_reference import Published, attention
from reference import Array

Grid = tuple[int, int, int]


class Rotary(Published):
    """One image or clip, whose patches lie token by token unless its `block` is 1."""

    block = 2
    vision_key = "vision_config"

    @property
    def vision(self) -> dict[str, int]:
        own: dict[str, int] = self.settings[self.vision_key]
        return own

    @torch.inference_mode()
    def item(self, grid: Grid, pixels: Tensor, crops: Tensor | None = None) -> Array:
        """The rows of one item."""
        assert crops is None
        frames = [self.rows(own, (1, *grid[1:])) for own in torch.as_tensor(pixels).to(self.dtype).chunk(grid[0])]
        return torch.cat(frames).float().cpu().numpy()

    def rows(self, pixels: Tensor, grid: Grid) -> Tensor:
        raise NotImplementedError

    def ordered(self, rows: Tensor, grid: Grid) -> Tensor:
        """What each patch of a frame `(h, w, ...)` has, `(patches, ...)` for all frames."""
        h, w, n = grid[1] // self.block, grid[2] // self.block, self.block
        blocks = rows.unflatten(1, (w, n)).unflatten(0, (h, n)).transpose(1, 2).flatten(0, 3)
        return blocks.repeat(grid[0], *[1] * (blocks.ndim - 1))

    def turned(self, rows: Tensor, grid: Grid) -> Tensor:
        """Queries or keys `(patches, C)`: a quarter of a head's columns for rows, the next for columns, and again."""
        heads = rows.unflatten(1, (self.vision["num_attention_heads"], 2, -1)).float()
        quarter = heads.shape[-1] // 2
        frequencies = 1.0 / 10000 ** (torch.arange(quarter) / quarter)
        places = torch.stack(torch.meshgrid(*map(torch.arange, grid[1:]), indexing="ij"), dim=-1)
        angles = (self.ordered(places, grid)[..., None] * frequencies).flatten(1)[:, None]
        first, second = heads.unbind(2)
        halves = (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin())
        return torch.stack(halves, dim=2).flatten(1).to(rows.dtype)

    def embedded(self, pixels: Tensor, name: str, grid: Grid, mode: str) -> Tensor:
        """Patches, and SigLIP's positions resampled to a frame."""
        weight, bias = (self.weight(f"{name}.patch_embedding.{part}") for part in ("weight", "bias"))
        table = self.weight(f"{name}.position_embedding.weight").float()
        side = round(len(table) ** 0.5)
        square = table.T.reshape(1, -1, side, side)
        resampled = functional.interpolate(square, size=grid[1:], mode=mode, align_corners=False)[0]
        positions = self.ordered(resampled.permute(1, 2, 0), grid).to(self.dtype)
        return functional.linear(pixels.flatten(1), weight.flatten(1), bias) + positions


class DotsOcr(Rotary):
    """modeling_dots_vision.py beside the weights of rednote-hilab/dots.ocr."""

    def rows(self, pixels: Tensor, grid: Grid) -> Tensor:
        name, width = "vision_tower", self.vision["embed_dim"]
        patchifier = f"{name}.patch_embed.patchifier"
        weight, bias = (self.weight(f"{patchifier}.proj.{part}") for part in ("weight", "bias"))
        states = self.rms(functional.linear(pixels.flatten(1), weight.flatten(1), bias), f"{patchifier}.norm")
        for layer in range(self.vision["num_hidden_layers"]):
            own = f"{name}.blocks.{layer}"
            q, k, v = self.linear(self.rms(states, f"{own}.norm1"), f"{own}.attn.qkv").chunk(3, dim=-1)
            mixed = attention(self.turned(q, grid), self.turned(k, grid), v, self.vision["num_attention_heads"])
            states = states + self.linear(mixed, f"{own}.attn.proj")
            normed = self.rms(states, f"{own}.norm2")
            gated = functional.silu(self.linear(normed, f"{own}.mlp.fc1")) * self.linear(normed, f"{own}.mlp.fc3")
            states = states + self.linear(gated, f"{own}.mlp.fc2")
        tokens = self.norm(self.rms(states, f"{name}.post_trunk_norm"), f"{name}.merger.ln_q").view(-1, 4 * width)
        return self.linear(functional.gelu(self.linear(tokens, f"{name}.merger.mlp.0")), f"{name}.merger.mlp.2")

    def rms(self, states: Tensor, name: str) -> Tensor:
        return functional.rms_norm(states.float(), states.shape[-1:], eps=1e-5).to(states.dtype) * self.weight(
            f"{name}.weight"
        )


class Keye(Rotary):
    """vllm/model_executor/models/keye.py; all frames of a clip attend to each other."""

    block = 1
    per_patch = True

    def item(self, grid: Grid, pixels: Tensor, crops: Tensor | None = None) -> Array:
        if not self.per_patch:
            return super().item(grid, pixels, crops)
        with torch.inference_mode():
            return self.rows(torch.as_tensor(pixels).to(self.dtype), grid).float().cpu().numpy()

    def rows(self, pixels: Tensor, grid: Grid) -> Tensor:
        states = self.embedded(pixels, "visual.vision_model.embeddings", grid, "bilinear")
        states = self.siglip(states, "visual.vision_model", self.vision, partial(self.turned, grid=grid))
        states = self.norm(states, "mlp_AR.pre_norm", 1e-5) if self.per_patch else states
        t, h, w = grid
        squares = states.view(t, h // 2, 2, w // 2, 2, -1).transpose(2, 3).reshape(t * h * w // 4, -1)
        tokens = squares if self.per_patch else self.norm(squares, "mlp_AR.pre_norm", 1e-5)
        return self.linear(functional.gelu(self.linear(tokens, "mlp_AR.linear_1")), "mlp_AR.linear_2")


class Keye15(Keye):
    """vllm/model_executor/models/keye_vl1_5.py; each frame alone, and one norm of the four patches of a token."""

    per_patch = False


class Ovis25(Rotary):
    """modeling_ovis2_5.py beside the weights of AIDC-AI/Ovis2.5-*: `_encode` takes the last layer before its norm."""

    vision_key = "vit_config"

    def rows(self, pixels: Tensor, grid: Grid) -> Tensor:
        name = "visual_tokenizer.vit.vision_model"
        states = self.embedded(pixels, f"{name}.embeddings", grid, "bicubic")
        states = self.siglip_layers(states, name, self.vision, partial(self.turned, grid=grid))
        logits = self.linear(states.reshape(grid[1] * grid[2] // 4, -1), "visual_tokenizer.head.0")
        chances = self.norm(logits, "visual_tokenizer.head.1", 1e-5).softmax(-1, dtype=torch.float32)
        return functional.pad(chances.to(states.dtype), (0, 4)) @ self.weight("vte.weight")


ROTARY = {
    "dots_ocr": DotsOcr,
    "Keye": Keye,
    "KeyeVL1_5": Keye15,
    **dict.fromkeys(("ovis2_5", "ovis2_6", "ovis2_6_moe", "ovis2_6_next"), Ovis25),
}
"""By `model_type`."""
