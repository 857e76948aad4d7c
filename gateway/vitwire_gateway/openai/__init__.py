"""OpenAI's API. `chat` and `responses` are pure: images of a request, and the request with other parts in their place.

`chat_reading` reads requests, also forms, within limits; `content_parts` makes the engine's parts of their images.
Another API needs a `RequestForm`, such as that of `anthropic`: `cut` and `filled` take any path to an image.
"""
