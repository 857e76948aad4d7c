"""VideoLLaMA 3's vision side as its authors compute it, on their own weight names.

Written down from huggingface.co/DAMO-NLP-SG/VideoLLaMA3-7B: modeling_videollama3_encoder.py, modeling_videollama3.py.
"""

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from published_reference import Published
from reference import Array


class OriginalVideoLlama3(Published):
    """Rows of one image, whose patches are its tokens, or of one clip, whose tokens are of four patches."""

    def __init__(self, checkpoint: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        super().__init__(checkpoint, dtype, device)
        self._vision = self.settings["vision_encoder_config"]
        self._weights = {name.removeprefix("model."): tensor for name, tensor in self._weights.items()}

    @torch.inference_mode()
    def item(self, grid: tuple[int, int, int], pixels: Tensor, crops: Tensor | None = None) -> Array:
        """The embedding of one item."""
        assert crops is None
        merge = 1 if grid[0] == 1 else 2
        states = self._encoded(torch.as_tensor(pixels).to(self.device, self.dtype), grid, merge)
        hidden = functional.gelu(self.linear(self._merged(states, grid, merge), "mm_projector.readout.0"))
        return self.linear(hidden, "mm_projector.readout.2").float().cpu().numpy()

    def _encoded(self, pixels: Tensor, grid: tuple[int, int, int], merge: int) -> Tensor:
        kernel = self._weights["vision_encoder.embeddings.patch_embedding.weight"].flatten(1)
        states = functional.linear(pixels, kernel, self._weights["vision_encoder.embeddings.patch_embedding.bias"])
        angles = self._angles(grid, merge)
        for layer in range(self._vision["num_hidden_layers"]):
            own = f"vision_encoder.encoder.layers.{layer}"
            states = states + self._attended(self._norm(states, f"{own}.layer_norm1"), f"{own}.self_attn", angles, grid)
            hidden = self.linear(self._norm(states, f"{own}.layer_norm2"), f"{own}.mlp.fc1")
            states = states + self.linear(functional.gelu(hidden, approximate="tanh"), f"{own}.mlp.fc2")
        return self._norm(states, "vision_encoder.post_layernorm")

    def _angles(self, grid: tuple[int, int, int], merge: int) -> Tensor:
        """Rotary angles `(patches, head size / 2)`: by row, then by column, block by block."""
        frames, height, width = grid
        size = self._vision["hidden_size"] // self._vision["num_attention_heads"] // 2
        frequencies = 1.0 / 10000 ** (torch.arange(0, size, 2).float() / size)
        places = torch.stack(torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij"), dim=-1)
        blocks = places.view(height // merge, merge, width // merge, merge, 2).transpose(1, 2).reshape(-1, 2)
        angles: Tensor = (blocks[..., None] * frequencies).flatten(1).repeat(frames, 1).to(self.device)
        return angles

    def _attended(self, states: Tensor, name: str, angles: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """Within each frame."""
        heads = self._vision["num_attention_heads"]
        query, key, value = (
            self.linear(states, f"{name}.{kind}_proj").view(grid[0], -1, heads, states.shape[-1] // heads)
            for kind in "qkv"
        )
        turned = angles.view(grid[0], -1, 1, angles.shape[-1])
        query, key = (_rotated(each, turned).transpose(1, 2) for each in (query, key))
        frames = functional.scaled_dot_product_attention(query, key, value.transpose(1, 2))
        return self.linear(frames.transpose(1, 2).reshape(states.shape), f"{name}.out_proj")

    @staticmethod
    def _merged(states: Tensor, grid: tuple[int, int, int], merge: int) -> Tensor:
        frames, height, width = grid
        blocks = states.view(frames, height // merge, width // merge, merge, merge, -1).transpose(2, 3)
        image = blocks.reshape(frames, height, width, -1).permute(0, 3, 1, 2)
        smaller = functional.interpolate(image, size=(height // merge, width // merge), mode="bilinear")
        return smaller.permute(0, 2, 3, 1).flatten(0, 2)

    def _norm(self, states: Tensor, name: str) -> Tensor:
        return self.norm(states, name, self._vision["layer_norm_eps"])


def _rotated(states: Tensor, angles: Tensor) -> Tensor:
    """Columns half a head apart, turned in float32."""
    wide = states.float()
    first, second = wide.chunk(2, dim=-1)
    cosines, sines = (each.repeat(1, 1, 1, 2) for each in (angles.cos(), angles.sin()))
    return (wide * cosines + torch.cat([-second, first], dim=-1) * sines).to(states.dtype)
