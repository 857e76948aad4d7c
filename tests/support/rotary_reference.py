"""Packed towers with rotary positions that transformers has no classes for, written down from their authors' code."""

import torch
from torch import Tensor
from torch.nn import functional

from published_reference import PublishedTiles, attention


class Rotary(PublishedTiles):
    """One item at a time, whose patches lie token by token unless a `block` is one patch."""

    block, key, whole_clips = 2, "vision_config", False

    def embedding(self, pixels: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """Rows of an image, or of a clip whose frames are computed alone unless patches see whole clips."""
        (frames, self.h, self.w), self.vision = grid, self.settings[self.key]
        return torch.cat([self._rows(part) for part in pixels.chunk(1 if self.whole_clips else frames)])

    def ordered(self, values: Tensor, patches: int) -> Tensor:
        """What `(h, w, ...)` holds for each of `patches` of equal frames."""
        squares = values.unflatten(1, (-1, self.block)).unflatten(0, (-1, self.block))
        frame: Tensor = squares.transpose(1, 2).flatten(0, 3)
        return frame.repeat(patches // len(frame), *[1] * (frame.ndim - 1))

    def turned(self, rows: Tensor) -> Tensor:
        """Queries or keys `(patches, C)`: both halves of a head by row, then by column, of their patch."""
        first, second = rows.float().unflatten(1, (self.vision["num_attention_heads"], 2, -1)).unbind(2)
        frequencies = 10000 ** -(torch.arange(0, first.shape[-1], 2) / first.shape[-1])
        places = torch.cartesian_prod(torch.arange(self.h), torch.arange(self.w)).view(self.h, self.w, 2)
        angles = (self.ordered(places, len(rows))[..., None] * frequencies).flatten(1)[:, None].to(self.device)
        halves = (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin())
        return torch.stack(halves, dim=2).flatten(1).to(rows.dtype)

    def placed(self, pixels: Tensor, name: str, mode: str) -> Tensor:
        """Patches with SigLIP's positions, which are resampled to a frame."""
        table = self.weight(f"{name}.embeddings.position_embedding.weight").float()
        side = round(len(table) ** 0.5)
        square = table.T.reshape(1, -1, side, side)
        resampled = functional.interpolate(square, size=(self.h, self.w), mode=mode, align_corners=False)[0]
        positions = self.ordered(resampled.permute(1, 2, 0), len(pixels)).to(self.dtype)
        return self.embedded(pixels, f"{name}.embeddings.patch_embedding") + positions


class DotsOcr(Rotary):
    """modeling_dots_vision.py beside the weights of rednote-hilab/dots.ocr."""

    def _rows(self, pixels: Tensor) -> Tensor:
        patchifier = "vision_tower.patch_embed.patchifier"
        states = self.rms(self.embedded(pixels, f"{patchifier}.proj"), f"{patchifier}.norm", 1e-5)
        for layer in range(self.vision["num_hidden_layers"]):
            own = f"vision_tower.blocks.{layer}"
            q, k, v = self.linear(self.rms(states, f"{own}.norm1", 1e-5), f"{own}.attn.qkv").chunk(3, dim=-1)
            mixed = attention(self.turned(q), self.turned(k), v, self.vision["num_attention_heads"])
            states = states + self.linear(mixed, f"{own}.attn.proj")
            states = states + self.gated(self.rms(states, f"{own}.norm2", 1e-5), f"{own}.mlp")
        normed = self.norm(self.rms(states, "vision_tower.post_trunk_norm", 1e-5), "vision_tower.merger.ln_q")
        hidden = self.linear(normed.reshape(len(normed) // 4, -1), "vision_tower.merger.mlp.0")
        return self.linear(functional.gelu(hidden), "vision_tower.merger.mlp.2")


class Keye(Rotary):
    """vllm/model_executor/models/keye.py: `Projector` normalises patches."""

    block, whole_clips = 1, True

    def _rows(self, pixels: Tensor) -> Tensor:
        name = "visual.vision_model"
        states = self.siglip(self.placed(pixels, name, "bilinear"), name, self.vision, self.turned)
        states = self.norm(states, "mlp_AR.pre_norm", 1e-5) if self.whole_clips else states
        tokens = states.unflatten(0, (-1, self.h // 2, 2, self.w // 2, 2)).transpose(2, 3).flatten(3).flatten(0, 2)
        tokens = tokens if self.whole_clips else self.norm(tokens, "mlp_AR.pre_norm", 1e-5)
        return self.linear(functional.gelu(self.linear(tokens, "mlp_AR.linear_1")), "mlp_AR.linear_2")


class Keye15(Keye):
    """vllm/model_executor/models/keye_vl1_5.py: frames alone, and `KeyeVL1_5Projector` normalises tokens."""

    whole_clips = False


class Ovis25(Rotary):
    """modeling_ovis2_5.py beside the weights of AIDC-AI/Ovis2.5-*: `_encode` takes the last layer before its norm."""

    key = "vit_config"

    def _rows(self, pixels: Tensor) -> Tensor:
        name = "visual_tokenizer.vit.vision_model"
        states = self.siglip_layers(self.placed(pixels, name, "bicubic"), name, self.vision, self.turned)
        logits = self.linear(states.reshape(len(states) // 4, -1), "visual_tokenizer.head.0")
        chances = self.norm(logits, "visual_tokenizer.head.1", 1e-5).softmax(-1, dtype=torch.float32)
        return functional.pad(chances.to(states.dtype), (0, 4)) @ self.weight("vte.weight")


class VideoLlama3(Rotary):
    """modeling_videollama3*.py beside the weights of DAMO-NLP-SG/VideoLLaMA3-7B: a clip's tokens are means of four."""

    key = "vision_encoder_config"

    def embedding(self, pixels: Tensor, grid: tuple[int, int, int]) -> Tensor:
        self.block = 1 if grid[0] == 1 else 2
        return super().embedding(pixels, grid)

    def _rows(self, pixels: Tensor) -> Tensor:
        name, readout = "model.vision_encoder", "model.mm_projector.readout"
        patches = self.embedded(pixels, f"{name}.embeddings.patch_embedding")
        states = self.siglip(patches, name, self.vision, self.turned)
        tokens = states.view(-1, self.block**2, states.shape[-1]).mean(1)
        return self.linear(functional.gelu(self.linear(tokens, f"{readout}.0")), f"{readout}.2")


ROTARY = {
    "dots_ocr": DotsOcr,
    "Keye": Keye,
    "KeyeVL1_5": Keye15,
    "videollama3_qwen2": VideoLlama3,
    **dict.fromkeys(("ovis2_5", "ovis2_6", "ovis2_6_moe", "ovis2_6_next"), Ovis25),
}
"""The reference of each tower here, by `model_type`."""
