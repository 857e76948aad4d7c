"""What the router's APIs share: requests with images and clips, and requests for an engine with other parts in place.

`image_refs` finds images in a request, `image_sources` what their URLs have, and `request_reading` reads whole requests
within limits. `content_parts` makes an engine's parts of the images, and `filling` puts them into the request. Another
API needs a `RequestForm`.
"""
