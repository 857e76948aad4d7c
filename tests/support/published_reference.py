"""Towers that transformers has no classes for, written down from their authors' modelling code."""

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import CONFIG_MAPPING, AutoModel

from reference import Alone, Array, stored
from vitwire_server.demo.checkpoint import random_model
from vitwire_server.towers.checkpoints.checkpoint import load_tower, open_checkpoint
from vitwire_server.towers.registry import FAMILIES

Turned = Callable[[Tensor], Tensor]


class Published(Alone):
    """A checkpoint's own weights and settings, by their published names."""

    def __init__(self, checkpoint: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        self.settings = json.loads((checkpoint / "config.json").read_text())
        self.dtype, self.device = dtype, device
        self._weights = {name: tensor.to(device, dtype) for name, tensor in stored(checkpoint).items()}

    @torch.inference_mode()
    def item(self, grid: tuple[int, int, int], pixels: Tensor, crops: Tensor | None = None) -> Array:
        """The embedding of one item, which has no crops."""
        assert crops is None
        rows = self.embedding(torch.as_tensor(pixels).to(self.device, self.dtype), grid)
        return rows.float().cpu().numpy()

    def embedding(self, pixels: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """The embedding of one item, from its pixels on the device."""
        raise NotImplementedError

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

    def rms(self, states: Tensor, name: str, epsilon: float) -> Tensor:
        """The RMS norm of this name."""
        wide = states.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
        return self._weights[f"{name}.weight"] * scaled.to(states.dtype)

    def embedded(self, pixels: Tensor, name: str) -> Tensor:
        """A tile `(C, H, W)`, or patches of as many values as the convolution of this name covers: `(patches, C)`."""
        kernel = self._weights[f"{name}.weight"]
        size = kernel.shape[-2:]
        patches = functional.unfold(pixels, size, stride=size).T if pixels.ndim == 3 else pixels
        return functional.linear(patches, kernel.flatten(1), self._weights.get(f"{name}.bias"))

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

    def embedding(self, pixels: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """The embedding of one slice."""
        assert grid[0] == 1
        return self._resampled(self._tower(pixels, *grid[1:]), *grid[1:])

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

    def embedding(self, pixels: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """The rows of one image's tiles `(tiles, C, H, W)`."""
        del grid
        return torch.cat([self._rows(tile) for tile in pixels])

    def _rows(self, tile: Tensor) -> Tensor:
        raise NotImplementedError


class InternVL(PublishedTiles):
    """The vision side of OpenGVLab's model, written down from its description.

    The same of NVLM-D (huggingface.co/nvidia/NVLM-D-72B, modeling_nvlm_d.py), whose projector has no biases, of
    H2OVL (huggingface.co/h2oai/h2ovl-mississippi-2b, modeling_h2ovl_chat.py) and of Skywork-R1V
    (huggingface.co/Skywork/Skywork-R1V-38B, modeling_skywork_chat.py).
    """

    def _rows(self, tile: Tensor) -> Tensor:
        return self._shuffled(self.states(tile)[1:])

    def states(self, tile: Tensor) -> Tensor:
        """The last layer's, the class token's first."""
        vision, prefix = self.settings["vision_config"], "vision_model.embeddings"
        patches = self.embedded(tile, f"{prefix}.patch_embedding")
        states = torch.cat([self.weight(f"{prefix}.class_embedding")[0], patches])
        states = states + self.weight(f"{prefix}.position_embedding")[0]
        epsilon = vision["layer_norm_eps"]
        norm = self.rms if vision["norm_type"] == "rms_norm" else self.norm
        for layer in range(vision["num_hidden_layers"]):
            own = f"vision_model.encoder.layers.{layer}"
            q, k, v = self.linear(norm(states, f"{own}.norm1", epsilon), f"{own}.attn.qkv").chunk(3, dim=-1)
            if vision["qk_normalization"]:
                q, k = (self.rms(each, f"{own}.attn.{name}_norm", epsilon) for name, each in (("q", q), ("k", k)))
            mixed = self.linear(attention(q, k, v, vision["num_attention_heads"]), f"{own}.attn.proj")
            states = states + mixed * self.weight(f"{own}.ls1")
            hidden = functional.gelu(self.linear(norm(states, f"{own}.norm2", epsilon), f"{own}.mlp.fc1"))
            states = states + self.linear(hidden, f"{own}.mlp.fc2") * self.weight(f"{own}.ls2")
        return states

    def _shuffled(self, states: Tensor) -> Tensor:
        """Pixels shuffled, then projected."""
        shuffled = squares(states, round(1 / self.settings["downsample_ratio"]))
        hidden = self.linear(self.norm(shuffled, "mlp1.0", 1e-5), "mlp1.1")
        return self.linear(functional.gelu(hidden), "mlp1.3")


class Eagle(InternVL):
    """github.com/NVlabs/Eagle, Eagle2_5/eaglevl/model/eagle2_5/modeling_eagle2_5_vl.py: `extract_feature`."""

    def _rows(self, tile: Tensor) -> Tensor:
        name = "vision_model.vision_model"
        patches = self.embedded(tile, f"{name}.embeddings.patch_embedding")
        states = patches + self.weight(f"{name}.embeddings.position_embedding.weight")
        return self._shuffled(self.siglip(states, name, self.settings["vision_config"]))


class Nemotron(InternVL):
    """github.com/vllm-project/vllm, nemotron_vl.py and nano_nemotron_vl.py, around transformers' C-RADIO.

    The projector without biases is Nano 2's, whose processor normalises pixels.
    """

    def __init__(self, checkpoint: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        super().__init__(checkpoint, dtype, device)
        parts: Any = random_model(self.settings["model_type"])
        self._tower = parts["tower"].to(device, dtype).eval()

    def _rows(self, tile: Tensor) -> Tensor:
        patches = self._tower(tile[None]).features[0]
        if "mlp1.3.bias" in self._weights:
            return self._shuffled(patches)
        hidden = self.linear(self.rms(squares(patches, 2), "mlp1.0", 1e-5), "mlp1.1")
        return self.linear(functional.relu(hidden).square(), "mlp1.3")


class Towered(Published):
    """One around a tower of transformers."""

    kind, prefix = "", ""

    def __init__(self, checkpoint: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        super().__init__(checkpoint, dtype, device)
        config: Any = CONFIG_MAPPING[self.kind](**{**self.settings["vision_config"], "model_type": self.kind})
        self._tower: Any = AutoModel.from_config(config, dtype=dtype).eval().to(device)
        own = {key.removeprefix(self.prefix): own for key, own in self._weights.items() if key.startswith(self.prefix)}
        assert not self._tower.load_state_dict(own, strict=False).unexpected_keys


class Bailing(Towered):
    """github.com/vllm-project/vllm, bailing_moe_v3_vl.py: Qwen3.5's layers, a norm, and two linear layers."""

    kind, prefix = "qwen3_5_vision", "model.visual."

    def embedding(self, pixels: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """The embedding of one image."""
        states = self._tower(pixels, grid_thw=torch.tensor([grid], device=self.device)).last_hidden_state
        merged = self._tower.merger.norm(states).reshape(-1, 4 * states.shape[-1])
        return self.linear(functional.gelu(self.linear(merged, "model.linear_proj.0")), "model.linear_proj.2")


class Phi3(Towered):
    """image_embedding_phi3_v.py beside microsoft/Phi-3.5-vision-instruct."""

    kind, prefix = "clip_vision_model", "model.vision_embed_tokens.img_processor.vision_model."

    def embedding(self, pixels: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """The overview is the first tile and comes last; a line of the others goes through all crops of a row."""
        states = self._tower(pixels, output_hidden_states=True).hidden_states[-2][:, 1:]
        tiles = torch.stack([squares(own, 2) for own in states])
        side, (down, across) = round(tiles.shape[1] ** 0.5), (-(-own // 2) for own in grid[1:])
        canvas = tiles[1:].view(-(-down // side), -1, side, side, tiles.shape[-1]).transpose(1, 2)
        crops = canvas.flatten(2, 3).flatten(0, 1)[:down, :across]
        parts = [self._lines(crops), self._lines(tiles[0].unflatten(0, (side, side)))]
        marked = torch.cat([parts[0], self.weight("model.vision_embed_tokens.glb_GN")[0], parts[1]])
        hidden = functional.gelu(self.linear(marked, "model.vision_embed_tokens.img_projection.0"))
        return self.linear(hidden, "model.vision_embed_tokens.img_projection.2")

    def _lines(self, lines: Tensor) -> Tensor:
        ends = self.weight("model.vision_embed_tokens.sub_GN")[0].expand(len(lines), -1, -1)
        return torch.cat([lines, ends], dim=1).flatten(0, 1)


class Phi4Siglip(Towered):
    """modeling_phi4_visionr.py beside microsoft/Phi-4-reasoning-vision-15B: `hidden_states[-2]`, and the projector."""

    kind, prefix = "siglip2_vision_model", "model.vision_tower.vision_tower.vision_model."

    def embedding(self, pixels: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """The embedding of one image."""
        mask = torch.ones(1, len(pixels), dtype=torch.int32, device=self.device)
        states = self._tower(pixels[None], mask, torch.tensor([grid[1:]]), output_hidden_states=True).hidden_states[-2]
        return self.linear(functional.gelu(self.linear(states[0], "model.mm_projector.0")), "model.mm_projector.2")


class Hy4(Published):
    """transformers 5.24, hy_v4_vl: its own tower if this release has it, else written down."""

    def embedding(self, pixels: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """The embedding of one image: a row for each square of patches, and one behind each line of them."""
        if "hy_v4_vl" in CONFIG_MAPPING:
            config: Any = CONFIG_MAPPING["hy_v4_vl"](**self.settings)
            module: Any = import_module("transformers.models.hy_v4_vl.modeling_hy_v4_vl")
            tower = module.HYV4VLVisionModel(config.vision_config).eval().to(self.device, self.dtype)
            named = {FAMILIES["hy_v4_vl"].tower.name(key): each for key, each in self._weights.items()}
            tower.load_state_dict({name: each for name, each in named.items() if name})
            return tower(pixels, grid_thw=torch.tensor([grid], device=self.device)).pooler_output[0]  # type: ignore[no-any-return]
        (_, h, w), vision = grid, self.settings["vision_config"]
        table = self.weight("vit.embeddings.position_embedding.weight")[1:].float()
        side = round(len(table) ** 0.5)
        factors = ((h + 0.1) / side, (w + 0.1) / side)
        placed = functional.interpolate(table.T.view(1, -1, side, side), scale_factor=factors, mode="bilinear")[0]
        states = self.embedded(pixels, "vit.embeddings.patch_embedding") + placed.flatten(1).T.to(self.dtype)
        for layer in range(vision["num_hidden_layers"]):
            own = f"vit.layers.{layer}"
            normed = self.norm(states, f"{own}.input_layernorm", 1e-5)
            q, k, v = (self.linear(normed, f"{own}.self_attn.{part}_proj") for part in "qkv")
            mixed = attention(q, k, v, vision["num_attention_heads"])
            states = states + self.linear(mixed, f"{own}.self_attn.o_proj")
            hidden = self.linear(self.norm(states, f"{own}.post_attention_layernorm", 1e-5), f"{own}.mlp.dense_h_to_4h")
            states = states + self.linear(functional.gelu(hidden), f"{own}.mlp.dense_4h_to_h")
        image = self.rms(states, "vit.perceive.norm", 1e-5).T.view(-1, h, w)
        hidden = functional.gelu(self.embedded(image, "vit.perceive.proj.0"))
        lines = self.embedded(hidden, "vit.perceive.proj.2").unflatten(0, (h // 2, -1))
        ends = self.weight("vit.perceive.image_newline").expand(len(lines), 1, -1)
        return torch.cat([lines, ends], dim=1).flatten(0, 1)


class Loaded(Published):
    """Our tower, which lays out each item by itself; vLLM's agrees (tests/engines/vllm/test_published_towers.py)."""

    def __init__(self, checkpoint: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        super().__init__(checkpoint, dtype, device)
        opened = open_checkpoint(str(checkpoint))
        loaded = load_tower(opened, dtype=dtype, device=torch.device(device))
        self.parts: Any = loaded.tower.modules

    def embedding(self, pixels: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """The rows of one image."""
        return self.parts["tower"](pixels, grid_thw=torch.tensor([grid])).pooler_output  # type: ignore[no-any-return]


class KimiK3(Loaded):
    """One that is not asked to pool frames."""

    def embedding(self, pixels: Tensor, grid: tuple[int, int, int]) -> Tensor:
        patches = pixels.view(len(pixels), 3, 14, 14)
        states = self.parts["tower"](patches, grid_thw=torch.tensor([grid])).last_hidden_state
        merged = states.view(grid[1] // 2, 2, grid[2] // 2, 2, -1).transpose(1, 2).flatten(0, 1)
        return self.parts["projector"](merged.flatten(1, 2))  # type: ignore[no-any-return]


class DeepseekVL2(PublishedTiles):
    """github.com/deepseek-ai/DeepSeek-VL2, deepseek_vl2/models: siglip_vit.py and modeling_deepseek_vl_v2.py.

    The rows of each tile, before `prepare_inputs_embeds` puts line breaks and a separator between them.
    """

    def _rows(self, tile: Tensor) -> Tensor:
        vision = self.settings["vision_config"]
        states = self.embedded(tile, "vision.patch_embed.proj") + self.weight("vision.pos_embed")[0]
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


class Moondream(PublishedTiles):
    """huggingface.co/moondream/moondream3-preview, vision.py and image_crops.py: `_run_vision_encoder`.

    The first row is the embedding of the token that `encode_image` puts before it.
    """

    def embedding(self, pixels: Tensor, grid: tuple[int, int, int]) -> Tensor:
        vision = self.settings["config"]["vision"]
        _, rows, columns = grid
        side, margin = vision["crop_size"] // 14, vision["overlap_margin"]
        window = side - 2 * margin
        overview, *crops = (self._rows(tile).view(side, side, -1) for tile in pixels)
        whole = overview.new_zeros(rows * window + 2 * margin, columns * window + 2 * margin, overview.shape[-1])
        for number, crop in enumerate(crops):  # what is inside a crop's margins is written last
            row, column = divmod(number, columns)
            top, left = margin * (row > 0), margin * (column > 0)
            own = crop[top : side - margin * (row < rows - 1), left : side - margin * (column < columns - 1)]
            down, right = row * window + top, column * window + left
            whole[down : down + own.shape[0], right : right + own.shape[1]] = own
        pooled = functional.adaptive_avg_pool2d(whole.permute(2, 0, 1), (vision["enc_n_layers"],) * 2)
        joined = torch.cat([overview.flatten(0, 1), pooled.flatten(1).T], dim=-1)
        hidden = functional.gelu(self.linear(joined, "model.vision.proj_mlp.fc1"), approximate="tanh")
        return torch.cat([self.weight("model.text.wte")[:1], self.linear(hidden, "model.vision.proj_mlp.fc2")])

    def _rows(self, tile: Tensor) -> Tensor:
        vision, name = self.settings["config"]["vision"], "model.vision"
        patches = functional.unfold(tile, 14, stride=14).T
        states = self.linear(patches, f"{name}.patch_emb") + self.weight(f"{name}.pos_emb")[0]
        for block in range(vision["enc_n_layers"]):
            own = f"{name}.blocks.{block}"
            q, k, v = self.linear(self.norm(states, f"{own}.ln1", 1e-5), f"{own}.attn.qkv").chunk(3, dim=-1)
            states = states + self.linear(attention(q, k, v, vision["enc_n_heads"]), f"{own}.attn.proj")
            hidden = self.linear(self.norm(states, f"{own}.ln2", 1e-5), f"{own}.mlp.fc1")
            states = states + self.linear(functional.gelu(hidden, approximate="tanh"), f"{own}.mlp.fc2")
        return self.norm(states, f"{name}.post_ln", 1e-5)


def squares(states: Tensor, side: int) -> Tensor:
    """A square of patches `(patches, C)` as `(patches / side², side² C)`: the patches of a token side by side."""
    tokens = round(len(states) ** 0.5) // side
    return states.view(tokens, side, tokens, side, -1).transpose(1, 2).reshape(tokens**2, -1)


def attention(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """Full attention of rows `(rows, columns)`, its softmax in float32."""
    query, key, value = (x.unflatten(-1, (heads, -1)).transpose(0, 1) for x in (q, k, v))
    scores = query @ key.transpose(1, 2) * query.shape[-1] ** -0.5
    rows: Tensor = (scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ value).transpose(0, 1).flatten(1)
    return rows


PUBLISHED: dict[str, type[Published]] = {
    **dict.fromkeys(("minicpmv", "minicpmo"), MiniCPMV),
    **dict.fromkeys(("internvl_chat", "NVLM_D", "h2ovl_chat", "skywork_chat"), InternVL),
    "bailing_moe_v3_vl": Bailing,
    "deepseek_vl_v2": DeepseekVL2,
    "eagle_2_5_vl": Eagle,
    "kimi_k3": KimiK3,
    "llava_onevision2": Loaded,
    "hy_v4_vl": Hy4,
    "moondream3": Moondream,
    "phi3_v": Phi3,
    "phi4-siglip": Phi4Siglip,
    **dict.fromkeys(("Llama_Nemotron_Nano_VL", "NemotronH_Nano_VL_V2"), Nemotron),
}
"""The reference of each published layout, by `model_type`."""
