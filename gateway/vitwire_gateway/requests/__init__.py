"""What the router's APIs share: requests with images and clips, and requests for an engine with other parts in place.

`image_refs` finds images in a request, `image_sources` what their URLs have, and `request_reading` reads whole requests
within limits. `content_parts` loads the images and makes parts of them that an engine takes (`dialects`), and `filling`
puts these into the request. Another API needs a `RequestForm`.
"""
