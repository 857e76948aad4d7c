"""Generate text with transformers while a Vitwire server computes the vision tower.

vitwire-server serve --model Qwen/Qwen3-VL-2B-Instruct
python generate.py localhost:50051 Qwen/Qwen3-VL-2B-Instruct cat.jpg "What is this?"
"""

import sys

import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from vitwire import Client
from vitwire.integrations.transformers import attach


def main(target: str, checkpoint: str, photograph: str, question: str) -> None:
    """Print the answer of the language model."""
    processor = AutoProcessor.from_pretrained(checkpoint)
    model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype="auto").eval()
    content = [{"type": "image", "path": photograph}, {"type": "text", "text": question}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    with Client(target) as client, torch.inference_mode():
        attach(model, client, keep=False)  # the weights of the local tower are dropped
        tokens = model.generate(**inputs.to(model.device), max_new_tokens=32, do_sample=False)
    answer = tokens[:, inputs["input_ids"].shape[1] :]
    print(processor.batch_decode(answer, skip_special_tokens=True)[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
