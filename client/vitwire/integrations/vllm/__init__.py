"""Embeddings as inputs of vLLM. The functions need neither vLLM nor, but for `image_embeds`, torch."""

from vitwire.integrations.vllm.parts import image_embeds, image_part, reference_part, video_part

__all__ = ["image_embeds", "image_part", "reference_part", "video_part"]
