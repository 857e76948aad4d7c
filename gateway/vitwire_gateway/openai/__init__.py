"""OpenAI's API. `chat` is pure: the images of a request, and the request with other parts in their place.

`chat_reading` reads requests, also forms, within limits; `parts` turns their images into the engine's content parts.
Another form of requests needs a function such as `images_of`: `cut` and `filled` take any path to an image.
"""
