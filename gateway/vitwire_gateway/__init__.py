"""Vitwire's gateway: other APIs in front of the encoder and an engine, each with a command of `vitwire`.

`router` is `vitwire router`, which reads chat completions by means of `requests`, and requests for `embeddings`.
`sglang` is `vitwire sglang-encoder`, SGLang's encoder protocol. Both stand on `images`, which fetches, checks and
encodes image files, and on the modules here: settings and commands, bodies, and the processes that read what
callers send.
"""
