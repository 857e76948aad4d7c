"""Vitwire's gateway: other APIs in front of the encoder and an engine, each with a command of `vitwire`.

`openai` is `vitwire router`, OpenAI's API in front of vLLM or SGLang; `sglang` is `vitwire sglang-encoder`, SGLang's
encoder protocol, which shares the limits, the workers and the fetching of images with it.
"""
