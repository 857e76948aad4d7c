"""The vision tower of Hugging Face models put aside for a service, and back."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

from vitwire import Embedding, Item, Model
from vitwire._embedding import Report
from vitwire._model import Limits
from vitwire.integrations.transformers import RemoteTower, attach, detach

IMAGE, VIDEO, START, END = 60, 61, 62, 63
TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3], "mrope_interleaved": True},
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
VISION = {"depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2}
VISION_3 = {**VISION, "out_hidden_size": 32, "intermediate_size": 32}
TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_vl": {**VISION_3, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
    "qwen2_5_vl": {**VISION_3, "window_size": 16, "fullatt_block_indexes": [1]},
    "qwen2_vl": {**VISION, "embed_dim": 32, "mlp_ratio": 1},
}


def tiny(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, text_config=TEXT, vision_config=FAMILIES[family], **TOKENS)
    model = AutoModelForImageTextToText.from_config(config, dtype=dtype)
    return model.eval()


class Local:
    """A client whose service is the model's own tower."""

    def __init__(self, model: PreTrainedModel, **changes: Any) -> None:
        self.tower = model.model.visual
        self.items: list[Item] = []
        config = self.tower.config
        self.levels = len(getattr(config, "deepstack_visual_indexes", ()))
        width = getattr(config, "out_hidden_size", config.hidden_size) * (1 + self.levels)
        described = {
            "model_id": "tiny",
            "model_type": model.config.model_type,
            "weights_fingerprint": "",
            "dtype": "float32",
            "embedding_width": width,
            "deepstack_levels": self.levels,
            "patch_size": 4,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "channels": 3,
            "image_preprocessor": None,
            "video_preprocessor": None,
            "budgets": (),
            "limits": Limits(0, 0, 0, 0, 0),
            "graphs": "off",
            "attention_backend": "",
            "device": "cpu",
            "server_version": "",
        }
        self.described = Model(**described | changes)

    def model(self) -> Model:
        return self.described

    @torch.no_grad()
    def encode(self, items: Sequence[Item]) -> list[Embedding]:
        self.items += items
        return [self._encode(item) for item in items]

    def _encode(self, item: Item) -> Embedding:
        out = self.tower(item.pixels, grid_thw=torch.tensor([item.grid]))
        rows = torch.cat([out.pooler_output, *getattr(out, "deepstack_features", [])], -1)
        if rows.dtype == torch.bfloat16:
            return Embedding(rows.view(torch.uint16).numpy(), "bfloat16", self.levels, Report())
        return Embedding(rows.numpy().astype(np.float32), "float32", self.levels, Report())


def inputs() -> dict[str, torch.Tensor]:
    """Two images of 2 and 4 tokens and a clip of two frames of 2 tokens."""
    clip = [[START, VIDEO, VIDEO, END]] * 2
    ids = [1, START, *[IMAGE] * 2, END, 5, START, *[IMAGE] * 4, END, 6, *clip[0], *clip[1], 7]
    ids_tensor = torch.tensor([ids])
    torch.manual_seed(1)
    return {
        "input_ids": ids_tensor,
        "attention_mask": torch.ones_like(ids_tensor),
        "mm_token_type_ids": (ids_tensor == IMAGE).int() + 2 * (ids_tensor == VIDEO).int(),
        "pixel_values": torch.randn(24, 96),
        "image_grid_thw": torch.tensor([[1, 2, 4], [1, 4, 4]]),
        "pixel_values_videos": torch.randn(16, 96),
        "video_grid_thw": torch.tensor([[2, 2, 4]]),
    }


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_a_model_answers_the_same_with_a_remote_tower(family: str, dtype: torch.dtype) -> None:
    model = tiny(family, dtype)
    own = model.model.visual
    sent = inputs()
    if family != "qwen3_vl":  # one token run for a whole clip
        ids = sent["input_ids"][0].tolist()
        sent["input_ids"] = torch.tensor([[*ids[:-9], START, *[VIDEO] * 4, END, 7, 7, 7]])
        sent["mm_token_type_ids"] = (sent["input_ids"] == IMAGE).int() + 2 * (sent["input_ids"] == VIDEO).int()
    before = model(**sent).logits
    client = Local(model)
    remote = attach(model, client)
    assert model.model.visual is remote
    assert isinstance(remote, RemoteTower)
    assert list(remote.parameters()) == []
    after = model(**sent).logits
    assert [item.grid for item in client.items] == [(1, 2, 4), (1, 4, 4), (2, 2, 4)]
    assert [item.modality for item in client.items] == ["image", "image", "video"]
    torch.testing.assert_close(after, before, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=2e-2)
    detach(model)
    assert model.model.visual is own
    assert torch.equal(model(**sent).logits, before)


@torch.no_grad()
def test_rows_follow_the_model() -> None:
    model = tiny("qwen3_vl")
    remote = attach(model, Local(model))
    assert (remote.dtype, remote.device, remote.spatial_merge_size) == (torch.float32, torch.device("cpu"), 2)
    pixels, grid = torch.randn(8, 96), torch.tensor([[1, 2, 4]])
    assert remote(pixels, grid_thw=grid).pooler_output.dtype == torch.float32
    model.to(torch.bfloat16)
    assert remote.dtype == torch.bfloat16
    assert remote.original.dtype == torch.float32
    out = remote(pixels, grid_thw=grid)
    assert out.pooler_output.shape == (2, 32)
    assert [each.shape for each in out.deepstack_features] == [(2, 32)] * 2
    assert out.deepstack_features[0].dtype == torch.bfloat16
    with pytest.raises(ValueError, match="8 patches, got 7"):
        remote(pixels[:7], grid_thw=grid)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen2_vl"}, "the model is a qwen3_vl"),
        ({"embedding_width": 32}, "32 wide with 2 deepstack levels, the model expects 96 with 2"),
        ({"deepstack_levels": 0}, "0 deepstack levels"),
    ],
)
def test_another_tower_is_refused(changes: dict[str, Any], message: str) -> None:
    model = tiny("qwen3_vl")
    with pytest.raises(ValueError, match=message):
        attach(model, Local(model, **changes))
    assert not isinstance(model.model.visual, RemoteTower)


def test_what_cannot_be_attached_or_detached_is_said() -> None:
    model = tiny("qwen3_vl")
    with pytest.raises(ValueError, match="nothing to detach"):
        detach(model)
    client = Local(model)
    attach(model, client)
    with pytest.raises(ValueError, match="already remote"):
        attach(model, client)
    with pytest.raises(ValueError, match="no vision tower"):
        attach(model.model.language_model, client)
    detach(model)
    attach(model.model, client)
    detach(model)


def test_a_tower_that_is_called_otherwise_is_refused() -> None:
    model = tiny("qwen3_vl")

    class Otherwise(torch.nn.Module):
        config = model.model.visual.config

        def forward(self, pixel_values: torch.Tensor, image_grid_thw: torch.Tensor) -> None: ...

    model.model.visual = Otherwise()
    with pytest.raises(ValueError, match="Otherwise does not take hidden_states and grid_thw"):
        attach(model, Local(tiny("qwen3_vl")))
