"""Vitwire as the vision encoder of SGLang.

`precomputed` and `expanded` are for SGLang's offline engine. SGLang's HTTP server takes no embeddings: the JSON of
`/generate` cannot carry tensors, and its content parts only have URLs. A server uses Vitwire through the command
`vitwire sglang-encoder`, which takes the place of SGLang's own encoder (`--language-only --encoder-urls`).
"""

from vitwire.integrations.sglang.precomputed import expanded, precomputed

__all__ = ["expanded", "precomputed"]
