"""Tiny checkpoints that Vitwire serves and vLLM configures itself from: those of the server, with a tokenizer."""

import json
import subprocess
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from servers import PYTHON

MODEL_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "internvl", "dots_ocr")
_INTERNVL_TOKENS = 16
"""Tokens of one tile of the tiny InternVL."""
WRITE = """
import sys
from pathlib import Path
from vitwire_server.demo.checkpoint import write_demo_checkpoint
for name in sys.argv[2:]:
    write_demo_checkpoint(name, Path(sys.argv[1]) / name)
"""
_IMAGE = "<|image_pad|>"
_SPECIAL = {
    "<|endoftext|>": 0,
    "<|im_start|>": 1,
    "<|im_end|>": 2,
    _IMAGE: 500,
    "<|video_pad|>": 501,
    "<|vision_start|>": 502,
    "<|vision_end|>": 503,
    "<img>": 504,
    "</img>": 505,
}
_NAMED = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": _IMAGE,
    "image_token": _IMAGE,
    "video_token": "<|video_pad|>",
    "boi_token": "<boi>",
    "eoi_token": "<eoi>",
    "img_line_break_token": "<line>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    **{f"{each}_token": f"<{each}>" for each in ("image_start", "image_end", "slice_start", "slice_end")},
    **{f"{each}_token": f"<{each}>" for each in ("image_id_start", "image_id_end", "audio", "boa", "eoa")},
    **{f"audio_{each}_token": f"<audio_{each}>" for each in ("bos", "eos")},
}
"""Special tokens by the names under which processors look for them."""
_MORE = (
    *("<fake_token_around_image>", "<end_of_utterance>", "<global-img>", "<|video|>", "<pad>"),
    *(f"<|{side}_of_{kind}|>" for side in ("begin", "end") for kind in ("image", "video")),
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
    *("\n" * count for count in range(1, 5)),
)
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif c.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def write_checkpoints(folder: Path) -> dict[str, Path]:
    """The server's tiny checkpoints, each with a tokenizer of bytes; all by one process of its environment."""
    folders = {name: folder / name for name in MODEL_TYPES}
    subprocess.run([PYTHON, "-c", WRITE, str(folder), *MODEL_TYPES], check=True, capture_output=True)
    for each in folders.values():
        write_tokenizer(each, "<|imgpad|>" if each.name == "dots_ocr" else _IMAGE)
    tokens = {"processor_class": "InternVLProcessor", "image_seq_length": _INTERNVL_TOKENS}
    (folders["internvl"] / "processor_config.json").write_text(json.dumps(tokens))
    return folders


def write_tokenizer(folder: Path, image: str = _IMAGE) -> None:
    """A tokenizer of bytes and special tokens; `image` stands for an embedding of an image."""
    vocabulary = {byte: 10 + index for index, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    more = dict.fromkeys((*_NAMED.values(), *_MORE))
    special = _SPECIAL | {name: number for number, name in enumerate(more, 506) if name not in _SPECIAL}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary | special, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "Qwen2TokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": _TEMPLATE,
        "extra_special_tokens": _NAMED,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for file in folder.glob("tokenizer*"):
        file.write_text(file.read_text().replace(_IMAGE, image))
