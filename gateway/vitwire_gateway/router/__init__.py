"""`vitwire router`: an OpenAI-compatible proxy that encodes images with Vitwire in front of an LLM engine.

`serving` makes what requests share and runs the process. A request enters by an `Endpoint` of `exchange`, which asks
`admission`; `routing` says what happens within, and `engine` is the server that gets it in the end.
"""
