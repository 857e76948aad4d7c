"""Requests with images and clips, of any API, and the requests that an engine gets instead.

`image_refs` finds images in a request, `image_sources` what their URLs have, and `request_reading` reads whole requests
within limits. `content_parts` loads the images and makes parts of them that an engine takes (`dialects`), and `filling`
puts these into the request. Another API needs a `RequestForm`.
"""
