"""A Hugging Face vision-language model whose vision tower runs in a Vitwire service.

    model = AutoModelForImageTextToText.from_pretrained(...)
    attach(model, "encoder:50051")
    model.generate(**inputs)

`get_image_features` and `get_video_features` of the model, which `generate` and `forward` take embeddings from, call
the service; everything else of the model is unchanged. docs/client.md has the table of models.
"""

from vitwire.integrations.transformers._attach import RemoteTower, attach, detach
from vitwire.integrations.transformers._features import Encoder

__all__ = ["Encoder", "RemoteTower", "attach", "detach"]
