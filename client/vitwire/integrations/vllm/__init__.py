"""vLLM with Vitwire as its vision encoder: embeddings as inputs, and an EC connector that fetches them.

    from vitwire.integrations.vllm import image_embeds, image_part, reference_part, video_part

The functions need neither vLLM nor, but for `image_embeds`, torch. `VitwireECConnector` is for vLLM itself to load
(`--ec-transfer-config`); docs/vllm.md has the launch line.
"""

from typing import TYPE_CHECKING

from vitwire.integrations.vllm.parts import image_embeds, image_part, reference_part, video_part

if TYPE_CHECKING:
    from vitwire.integrations.vllm.connector import VitwireECConnector

__all__ = ["VitwireECConnector", "image_embeds", "image_part", "reference_part", "video_part"]


def __getattr__(name: str) -> object:
    if name == "VitwireECConnector":
        from vitwire.integrations.vllm.connector import VitwireECConnector  # noqa: PLC0415  # needs vLLM

        return VitwireECConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
