"""A Qwen3-VL checkpoint with random weights, in the layout of the hub: `python -m bench.engine.checkpoint FOLDER`."""

import argparse
import json
from pathlib import Path
from typing import Any

Fields = dict[str, Any]

SPECIAL = {
    "<|endoftext|>": 0,
    "<|im_start|>": 1,
    "<|im_end|>": 2,
    "<|image_pad|>": 500,
    "<|video_pad|>": 501,
    "<|vision_start|>": 502,
    "<|vision_end|>": 503,
}
"""Tokens of the tokenizer beside one for each byte, from 10 on."""
FIRST_BYTE = 10
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n"
)
TOWER: Fields = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}
"""Qwen3-VL-2B and 8B have this tower, up to the width of its output."""
_TEXT: Fields = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}
"""Qwen3-VL-2B. Its head is not tied here: random weights would repeat the last token."""
LANGUAGES: dict[str, Fields] = {
    "2b": _TEXT,
    "8b": _TEXT | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
}
"""Language models of Qwen3-VL by size."""
_SMALL_TOWER: Fields = {"depth": 4, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4} | {
    "patch_size": 16,
    "num_position_embeddings": 256,
    "deepstack_visual_indexes": [1, 2],
}
_SMALL_TEXT: Fields = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4} | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
}
_PIXELS: Fields = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "rescale_factor": 1 / 255,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "merge_size": 2,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "processor_class": "Qwen3VLProcessor",
}
_PROCESSORS: dict[str, Fields] = {
    # The published shortest_edge of 65536 pixels would enlarge an image of 224 x 224.
    "preprocessor_config.json": {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": 1 << 14, "longest_edge": 1 << 24},
    },
    "video_preprocessor_config.json": {
        "video_processor_type": "Qwen3VLVideoProcessor",
        "size": {"shortest_edge": 1 << 12, "longest_edge": 25165824},
    },
}


def write(folder: Path, *, tiny: bool = False, device: str = "cpu", language: str = "2b") -> None:
    """A language model of `LANGUAGES` and the tower of 8B, in bfloat16; the folder appears once it is complete."""
    import torch  # noqa: PLC0415 - seconds, and vLLM's processes import this module
    from transformers import GenerationConfig, Qwen3VLForConditionalGeneration  # noqa: PLC0415 - as above

    text = _SMALL_TEXT if tiny else LANGUAGES[language]
    config = _config(text, {**(_SMALL_TOWER if tiny else TOWER), "out_hidden_size": text["hidden_size"]})
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3VLForConditionalGeneration._from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.add_(torch.randn_like(weight), alpha=0.1)
            else:
                weight.normal_(std=1.0 if name.endswith("embed_tokens.weight") else weight[0].numel() ** -0.5)
    part = folder.with_name(f"{folder.name}.part")
    _write_processors(part)
    model.generation_config = GenerationConfig(**_TOKENS)
    model.save_pretrained(part, max_shard_size="2GB")
    part.rename(folder)


def write_tower(folder: Path, tower: Any) -> None:
    """transformers' tower of a Qwen3-VL, for an engine that loads no language model (`mm_encoder_only`)."""
    from huggingface_hub import save_torch_state_dict  # noqa: PLC0415 - as above

    vision = tower.config.to_diff_dict()
    config = _config({**_TEXT, "hidden_size": vision["out_hidden_size"]}, vision)
    config.architectures = ["Qwen3VLForConditionalGeneration"]
    _write_processors(folder)
    save_torch_state_dict({f"model.visual.{name}": weight for name, weight in tower.state_dict().items()}, folder)
    config.save_pretrained(folder)


def _config(text: Fields, vision: Fields) -> Any:
    from transformers import Qwen3VLConfig  # noqa: PLC0415 - as above

    sections = [each * text["head_dim"] // 128 for each in (24, 20, 20)]
    sections[0] = text["head_dim"] // 2 - sum(sections[1:])
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": sections, "mrope_interleaved": True}
    text = text | {"max_position_embeddings": 65536, "tie_word_embeddings": False, "rope_parameters": rope}
    return Qwen3VLConfig(
        text_config=text | _TOKENS,
        vision_config=vision,
        image_token_id=SPECIAL["<|image_pad|>"],
        video_token_id=SPECIAL["<|video_pad|>"],
        vision_start_token_id=SPECIAL["<|vision_start|>"],
        vision_end_token_id=SPECIAL["<|vision_end|>"],
        tie_word_embeddings=False,
        dtype="bfloat16",
    )


def _write_processors(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    for name, fields in _PROCESSORS.items():
        (folder / name).write_text(json.dumps(_PIXELS | fields, indent=1), encoding="utf-8")


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of bytes, with a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415 - as above

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {byte: FIRST_BYTE + index for index, byte in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary | SPECIAL, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: Fields = {
        "tokenizer_class": "Qwen2TokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    settings |= {"chat_template": _TEMPLATE, "model_max_length": 65536}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--language", choices=LANGUAGES, default="2b")
    options = parser.parse_args()
    write(options.folder, tiny=options.tiny, device=options.device, language=options.language)
