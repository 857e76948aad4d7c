"""`vitwire router`: an OpenAI-compatible proxy that encodes images with Vitwire in front of an LLM engine.

`router_process` makes what requests share and serves. A request comes to an `endpoint`, which asks `admission` to let
it in; `routing` turns its images into embeddings, and `llm_engine` gets it in the end.
"""
