"""OpenAI's API. `chat` is pure: the images of a request, and the request with other parts in their place.

`chat_reading` reads requests, also forms, within limits; `content_parts` makes the engine's parts of their images.
Another form of requests needs a function such as `images_of`: `cut` and `filled` take any path to an image.
"""
