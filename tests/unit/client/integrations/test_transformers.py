"""The vision tower of Hugging Face models replaced by a service, and back."""

import copy
import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText, PreTrainedModel

from fake_service import model_message
from vitwire import AsyncClient, Embedding, Item, Model, Unavailable
from vitwire.embeddings import Report
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
        self.tower = copy.deepcopy(model.model.visual)
        self.items: list[Item] = []
        config = self.tower.config
        self.levels = len(getattr(config, "deepstack_visual_indexes", ()))
        width = getattr(config, "out_hidden_size", config.hidden_size) * (1 + self.levels)
        own: dict[str, Any] = {"model_type": model.config.model_type, "weights_fingerprint": "", "dtype": "float32"}
        own |= {"budgets": (), "embedding_width": width, "deepstack_levels": self.levels}
        self.described = replace(Model.from_message(model_message()), **own | changes)

    def model(self) -> Model:
        return self.described

    @torch.no_grad()
    def encode(self, items: Sequence[Item]) -> list[Embedding]:
        self.items += items
        return [self._encode(item) for item in items]

    def _encode(self, item: Item) -> Embedding:
        pixels = item.pixels
        assert isinstance(pixels, torch.Tensor)
        out = self.tower(pixels.to(self.tower.dtype), grid_thw=torch.tensor([item.grid]))
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
    attach(model, client)
    assert isinstance(model.model.visual, RemoteTower)
    assert list(model.model.visual.parameters()) == []
    after = model(**sent).logits
    assert [item.grid for item in client.items] == [(1, 2, 4), (1, 4, 4), (2, 2, 4)]
    assert [item.modality for item in client.items] == ["image", "image", "video"]
    torch.testing.assert_close(after, before, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=2e-2)
    detach(model)
    assert model.model.visual is own
    assert torch.equal(model(**sent).logits, before)


@torch.no_grad()
def test_rows_and_the_restored_tower_follow_the_model() -> None:
    model = tiny("qwen3_vl")
    attach(model, Local(model))
    pixels, grid = torch.randn(8, 96), torch.tensor([[1, 2, 4]])
    assert model.get_image_features(pixels, grid).pooler_output[0].dtype == torch.float32
    model.to(torch.bfloat16)
    out = model.get_image_features(pixels, image_grid_thw=grid)
    assert [each.shape for each in out.pooler_output] == [(2, 32)]
    assert [[each.shape for each in level] for level in out.deepstack_features] == [[(2, 32)]] * 2
    assert out.deepstack_features[0][0].dtype == torch.bfloat16
    as_tuple = model.get_image_features(pixels, grid, return_dict=False)
    assert torch.equal(as_tuple[0][0], out.pooler_output[0])
    detach(model)
    assert model.model.visual.dtype == torch.bfloat16
    assert model.get_image_features(pixels, grid).pooler_output[0].dtype == torch.bfloat16


@torch.no_grad()
def test_pixels_are_sent_in_the_dtype_that_the_service_computes_in() -> None:
    model = tiny("qwen2_vl")
    client = Local(model, dtype="bfloat16")
    attach(model, client)
    model.get_image_features(torch.randn(8, 96), torch.tensor([[1, 2, 4]]))
    pixels = client.items[0].pixels
    assert pixels is not None
    assert pixels.dtype == torch.bfloat16


def test_weights_that_are_not_kept_are_released() -> None:
    model = tiny("qwen3_vl")
    tower = weakref.ref(model.model.visual)
    text = {"input_ids": torch.tensor([[1, 5, 6, 7]])}
    pixels, grid = torch.randn(8, 96), torch.tensor([[1, 2, 4]])
    logits = model(**text).logits
    client = Local(model)
    attach(model, client, keep=False)
    gc.collect()
    assert tower() is None
    before = model.get_image_features(pixels, grid).pooler_output
    detach(model)
    assert torch.equal(model(**text).logits, logits)
    with pytest.raises(AttributeError, match=r"attach\(keep=False\) has to be loaded again"):
        model.get_image_features(pixels, grid)
    with pytest.raises(RuntimeError, match="this vision tower is in a Vitwire service"):
        model.model.visual(pixels, grid)
    attach(model, client)
    assert torch.equal(model.get_image_features(pixels, grid).pooler_output[0], before[0])


def test_a_transformers_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("qwen3_vl")
    local = Local(model)
    monkeypatch.setattr(transformers, "__version__", "5.17.0")
    with pytest.raises(RuntimeError, match=r"needs transformers 5\.18 or newer, 5\.17\.0 is installed"):
        attach(model, local)


def test_a_prompt_without_images_does_not_call_the_service() -> None:
    model = tiny("qwen3_vl")
    client = Local(model)
    attach(model, client)
    model.generate(torch.tensor([[1, 5, 6, 7]]), max_new_tokens=2)
    assert client.items == []


@torch.no_grad()
def test_beams_share_the_embeddings_of_their_prompt() -> None:
    model = tiny("qwen3_vl")
    sent, settings = inputs(), {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 4, "do_sample": False}
    local = model.generate(**sent, **settings)
    client = Local(model)
    attach(model, client)
    with torch.inference_mode():
        assert torch.equal(model.generate(**sent, **settings), local)
    assert len(client.items) == 3


def test_the_language_model_can_be_trained_and_pixels_cannot() -> None:
    model = tiny("qwen3_vl")
    attach(model, Local(model))
    sent = inputs()
    model(**sent, labels=sent["input_ids"]).loss.backward()
    assert model.get_input_embeddings().weight.grad is not None
    sent["pixel_values"].requires_grad_()
    with pytest.raises(ValueError, match="pixel_values requires a gradient"):
        model(**sent)
    with torch.no_grad():
        model(**sent)


def test_what_was_on_the_module_before_is_restored() -> None:
    model = tiny("qwen3_vl")
    calls: list[str] = []
    original = model.model.get_image_features

    def traced(*args: Any, **kwargs: Any) -> Any:
        calls.append("image")
        return original(*args, **kwargs)

    model.model.get_image_features = traced
    attach(model, Local(model))
    detach(model)
    model.get_image_features(torch.randn(8, 96), torch.tensor([[1, 2, 4]]))
    assert calls == ["image"]
    assert not any("vitwire" in name or name == "get_video_features" for name in vars(model.model))


def test_an_attached_model_is_attached_anew_after_detach() -> None:
    model = tiny("qwen2_vl")
    for _ in range(2):
        attach(model.model, Local(tiny("qwen2_vl")))
        with pytest.raises(ValueError, match="already remote"):
            attach(model, Local(tiny("qwen2_vl")))
        detach(model)
    with pytest.raises(ValueError, match="nothing to detach"):
        detach(model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen2_vl"}, "the model is a qwen3_vl"),
        ({"embedding_width": 32}, "32 wide with 2 deepstack levels, the model expects 96 with 2"),
        ({"deepstack_levels": 0}, "0 deepstack levels"),
        ({"weights_fingerprint": "abc"}, "the fingerprint abc, not def"),
    ],
)
def test_another_tower_is_refused(changes: dict[str, Any], message: str) -> None:
    model = tiny("qwen3_vl")
    with pytest.raises(ValueError, match=message):
        attach(model, Local(model, **{"weights_fingerprint": "def"} | changes), weights_fingerprint="def")
    assert not isinstance(model.model.visual, RemoteTower)


def test_a_target_without_a_server_leaves_the_model_as_it_was() -> None:
    model = tiny("qwen3_vl")
    with pytest.raises(ValueError, match="http"):
        attach(model, "http://127.0.0.1:1")
    with pytest.raises(Unavailable):
        attach(model, "127.0.0.1:1")
    assert not isinstance(model.model.visual, RemoteTower)


def test_what_cannot_be_attached_is_refused() -> None:
    model = tiny("qwen3_vl")
    with pytest.raises(ValueError, match="Qwen3VLTextModel has no vision tower"):
        attach(model.model.language_model, Local(model))
    with pytest.raises(ValueError, match="nothing to detach"):
        detach(model)
    with pytest.raises(TypeError, match=r"needs a vitwire\.Client, got an AsyncClient"):
        attach(model, AsyncClient("127.0.0.1:1"))  # what the test is about
    settings = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    siglip = AutoModel.from_config(AutoConfig.for_model("siglip2", text_config=settings, vision_config=settings))
    with pytest.raises(ValueError, match="a siglip2 cannot be attached; models that can: qwen2_vl, "):
        attach(siglip, Local(model))
