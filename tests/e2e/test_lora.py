"""An adapter that a server merges at start, over the wire."""

from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from checkpoints import Checkpoints
from reference import TOLERANCE, Reference, error
from servers import PIXELS_ONLY, serving
from vitwire import Client, Item

TARGETS = r".*visual\.blocks\.\d+\.attn\.qkv"


def write_adapter(checkpoint: Path, folder: Path, targets: str) -> None:
    adapter = get_peft_model(Reference(checkpoint).model, LoraConfig(r=4, target_modules=targets))
    with torch.no_grad():
        for name, weight in adapter.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.2)
    adapter.save_pretrained(folder)


def test_a_server_answers_with_the_adapter_merged(checkpoints: Checkpoints, tmp_path: Path) -> None:
    checkpoint = checkpoints("qwen2_vl")
    write_adapter(checkpoint, tmp_path, TARGETS)
    reference = Reference(checkpoint)
    pixels = np.random.default_rng(0).standard_normal((96, 3 * 2 * 14 * 14), dtype=np.float32)
    (before,) = reference.encode(pixels, [(1, 8, 12)])
    PeftModel.from_pretrained(reference.model, tmp_path).merge_and_unload()
    (after,) = reference.encode(pixels, [(1, 8, 12)])
    flags = ("--dtype", "float32", "--lora", f"tuned={tmp_path}")
    with serving(checkpoint, *flags) as process, Client(process.target) as client:
        model = client.model()
        (embedding,) = client.encode([Item(pixels, (1, 8, 12))])
    assert model.model_id == "tiny-qwen2_vl+tuned"
    assert error(embedding.numpy(), after) <= TOLERANCE
    assert error(embedding.numpy(), before) > 1e-2


@pytest.mark.matrix
def test_a_server_says_that_an_adapter_is_none_of_the_tower(checkpoints: Checkpoints, tmp_path: Path) -> None:
    write_adapter(checkpoints("qwen2_vl"), tmp_path, r".*language_model.*q_proj")
    told = "adapts the language model only"
    with (
        pytest.raises(RuntimeError, match=told),
        serving(checkpoints("qwen2_vl"), *PIXELS_ONLY, "--lora", f"tuned={tmp_path}"),
    ):
        pass
