"""Images and clips of requests as their URLs have them: base64, or addresses to fetch. Pure functions."""

import json
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Self

from vitwire.items import Modality
from vitwire.shared.data_uris import decoded, mistaken, payload_of
from vitwire.wire import Buffer
from vitwire_gateway.api_errors import ApiError, invalid, released
from vitwire_gateway.gateway_settings import RouterSettings
from vitwire_gateway.images.fetching import too_large
from vitwire_gateway.requests.image_refs import ImageRef

Kind = Literal["data", "url"]

_MAX_URL = 8192
"""Characters in JSON, by which a worker answers."""


class Limits(NamedTuple):
    max_images: int
    """Images and clips together."""
    max_image_bytes: int
    allow_embeds: bool = False
    """Callers may send embeddings."""


class Place(NamedTuple):
    """The name of an image or clip of a request in errors, and which of the sources it is."""

    param: str
    source: int


class Source(NamedTuple):
    """An image or clip of a request: its file, its URL, or what is wrong with it."""

    kind: Kind
    content: Buffer | str | ApiError
    modality: Modality = "image"


class RequestImages(NamedTuple):
    """The images and clips of a request."""

    places: Sequence[Place]
    """Where images and clips stand, in the request's order."""
    sources: Sequence[Source]
    """Each once."""
    options: Sequence[tuple[str, int]] = ()
    """Name and value of each option of all images: workers send no objects."""

    @classmethod
    def of(cls, answer: Sequence[Any]) -> Self:
        """The images as a worker sends them."""
        places, sources, options = answer
        return cls([Place(*each) for each in places], [Source(*each) for each in sources], options)


def images_in(refs: Sequence[ImageRef], limits: Limits) -> RequestImages:
    """The images and clips of a request. Raises ApiError for too many."""
    if len(refs) > limits.max_images:
        what = "images and clips" if any(each.modality == "video" for each in refs) else "images"
        limit = f"{limits.max_images} ({RouterSettings.named('max_images')})"
        text = f"the request has {len(refs)} {what}, the limit is {limit}"
        raise invalid(text, str(refs[0].path[0]), "too_many_images")
    numbers: dict[tuple[object, ...], int] = {}
    places, sources = list[Place](), list[Source]()
    for ref in refs:
        key = ref.url, ref.modality
        if key not in numbers:
            numbers[key] = len(sources)
            sources.append(_source(ref, limits.max_image_bytes))
        places.append(Place(ref.param, numbers[key]))
    return RequestImages(places, sources)


def _source(ref: ImageRef, max_bytes: int) -> Source:
    url, param = ref.url, ref.param
    kind: Kind = "data" if url[:5].lower() == "data:" else "url"
    try:
        if kind == "url":
            if reason := mistaken(url):
                raise invalid(reason, param, "image_url_refused" if "file:" in reason else "invalid_image_url")
            if len(json.dumps(url)) > _MAX_URL:
                raise invalid(f"the URL exceeds the limit of {_MAX_URL} characters", param, "invalid_image_url")
            return Source(kind, url, ref.modality)
        file = decode_data_uri(url, max_bytes, param)
    except ApiError as error:
        released(error)
        return Source(kind, error, ref.modality)
    return Source(kind, file, ref.modality)


def decode_data_uri(url: str, max_bytes: int, param: str) -> bytes:
    """The bytes of a `data:` URI in base64. Raises ApiError."""
    try:
        payload = payload_of(url)
    except ValueError as error:
        raise invalid(str(error), param, "invalid_image_url") from error
    try:
        file = decoded(payload) if len(payload) // 4 * 3 <= max_bytes + 2 else None
    except ValueError as error:
        raise invalid(str(error), param, "invalid_base64") from error
    if file is None or len(file) > max_bytes:
        raise too_large(max_bytes, RouterSettings.named("max_image_bytes"), param)
    return file
