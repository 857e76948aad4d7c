"""Adapters with random factors, as peft writes them."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model


def trained(model: Any, folder: Path, **settings: Any) -> None:
    """Write an adapter of the model with random factors, as peft saves it. Wraps the model."""
    adapter = get_peft_model(model, LoraConfig(**{"r": 4, "lora_alpha": 6, **settings}))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in sorted(adapter.named_parameters()):
            if "lora_" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1)
    adapter.save_pretrained(str(folder))
