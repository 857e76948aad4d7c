"""Vitwire's gateway: other APIs in front of the encoder and an engine, each with a command of `vitwire`.

`router` is `vitwire router`, and `openai` and `anthropic` the APIs that it reads: requests with images, and the
engine's parts in their place. `sglang` is `vitwire sglang-encoder`, SGLang's encoder protocol. Both stand on `images`,
which fetches, checks and encodes image files, and on the modules here: settings and commands, what requests share, and
the processes that read what callers send.
"""
