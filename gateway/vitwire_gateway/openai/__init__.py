"""`vitwire router`: an OpenAI-compatible proxy that encodes images with Vitwire in front of an LLM engine.

`settings` are the flags, `serve` runs the process, `connections` are those of callers, `app` makes what requests share,
`endpoint` is the boundary of each request and `routing` what happens within. `rewriting` is pure: the images of an
OpenAI request, and the request with other parts in their place. `uploads` and `fetching` get an image's bytes,
`encoding` its embedding, `dialects` the engine's content part; `images` does all three for a request. `upstream` sends
requests to the engine.
"""
