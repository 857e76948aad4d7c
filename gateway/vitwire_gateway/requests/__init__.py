"""Requests with images and clips, and the requests that an engine gets instead.

`chat` finds images in a request, `image_sources` what their URLs have, and `request_reading` reads whole requests
within limits. `content_parts` loads the images and makes parts of them that an engine takes (`engine_parts`), and
`filling` puts these into the request.
"""
