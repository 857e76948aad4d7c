"""Requests for embeddings in OpenAI's and Cohere's form: their images and options. Pure functions."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

from vitwire.shared.data_uris import NO_HEAD, is_bare
from vitwire_gateway.api_errors import ApiError, invalid
from vitwire_gateway.bodies import Json, parse
from vitwire_gateway.requests.chat import images_of
from vitwire_gateway.requests.image_refs import ImageRef, Path, param_of
from vitwire_gateway.requests.image_sources import Limits, RequestImages, images_in

_MAX_DIMENSIONS = 1 << 31
_NO_TEXT = "Vitwire embeds images, no text: use the text encoder of the same checkpoint"
_NEUTRAL: Mapping[str, Sequence[object]] = {
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
}
"""vLLM's options of embeddings, with the values that have no effect here."""
_COHERE_TYPES = ("float", "base64", "binary", "ubinary")
_MARKS = (b"image", b"data:", b"\\u", b"\0")
"""An image's URL, its part or the modality have one of these, unless escaped or in UTF-16; other bodies have none."""


class EmbeddingOptions(NamedTuple):
    types: Sequence[str]
    """Forms of the vectors in the answer: float, base64; of Cohere also binary and ubinary."""
    dimensions: int | None = None
    """Length to cut vectors to."""
    normalize: bool | None = None
    """None: if the model has one vector per image."""
    by_item: bool = False
    """An image that cannot be embedded has an error in place of its vectors, and fails no other."""


class EmbeddingRequest(NamedTuple):
    """A request for embeddings that has been read."""

    options: EmbeddingOptions
    images: RequestImages

    @classmethod
    def of(cls, answer: Sequence[Any]) -> Self:
        """The request as a worker sends it."""
        options, images = answer
        return cls(EmbeddingOptions(*options), RequestImages.of(images))


def openai_request(body: bytes, limits: Limits, *, has_engine: bool) -> EmbeddingRequest | None:
    """The request in a body in OpenAI's form; None if it is the engine's, as it has text. Raises ApiError."""
    if has_engine and not any(mark in body for mark in _MARKS):
        return None
    request = parse(body)
    if has_engine and not _is_of_images(request):
        return None
    found = _of_messages(request) if request.get("messages") is not None else _of_input(request)
    for name, values in _NEUTRAL.items():
        if request.get(name) not in (None, *values):
            raise invalid(f"only {values[0]!r} is supported", name)
    encoding = _choice(request, "encoding_format", ("float", "base64"))
    normalize = request.get("normalize")
    if not isinstance(normalize, bool | None):
        raise invalid("expected true or false", "normalize")
    by_item = _choice(request, "errors", ("request", "item")) == "item"
    options = EmbeddingOptions((encoding,), _dimensions(request, "dimensions"), normalize, by_item)
    return EmbeddingRequest(options, images_in(found, limits))


def cohere_request(body: bytes, limits: Limits) -> EmbeddingRequest:
    """The request in a body in Cohere's form. Raises ApiError."""
    request = parse(body)
    found = _of_cohere(request)
    types = request.get("embedding_types") or ["float"]
    if not isinstance(types, list) or not all(isinstance(each, str) for each in types):
        raise invalid("expected a list of strings", "embedding_types")
    for each in dict.fromkeys(types):
        if each in ("int8", "uint8"):
            text = f"{each} needs ranges that Cohere calibrates for each of its models; this model has none"
            raise invalid(text, "embedding_types")
        if each not in _COHERE_TYPES:
            raise invalid(f"expected {', '.join(_COHERE_TYPES)}, got {each[:32]!r}", "embedding_types")
    options = EmbeddingOptions(tuple(dict.fromkeys(types)), _dimensions(request, "output_dimension"))
    return EmbeddingRequest(options, images_in(found, limits))


def _is_of_images(request: Json) -> bool:
    """True for a request of images, which Vitwire answers in front of an engine."""
    if request.get("modality") is not None:
        return bool(request["modality"] == "image")
    if request.get("messages") is not None:
        parts = list(_parts(request["messages"]))
        return bool(parts) and all(_is_image(part) for _, part in parts)
    inputs = request.get("input")
    inputs = inputs if isinstance(inputs, list) else [inputs]
    return any(isinstance(each, str) and each[:5].lower() == "data:" for each in inputs)


def _of_input(request: Json) -> list[ImageRef]:
    if request.get("modality") not in (None, "image"):
        raise invalid(f"expected 'image'; {_NO_TEXT}", "modality")
    inputs = request.get("input")
    if inputs is None:
        raise ApiError(
            400, "input is missing: expected a data URI or URL of an image, or a list of them", param="input"
        )
    if not isinstance(inputs, list):
        return [_checked(("input",), inputs)]
    if not inputs:
        raise invalid("there are no images", "input")
    return [_checked(("input", number), each) for number, each in enumerate(inputs)]


def _of_messages(request: Json) -> list[ImageRef]:
    """The image of a conversation, which has one embedding."""
    for path, part in _parts(request["messages"]):
        if not _is_image(part):
            raise invalid(_NO_TEXT, param_of(path))
    found = images_of(request)
    if len(found) != 1:
        text = f"a conversation has one embedding, and this one has {len(found)} images: send them as `input`"
        raise invalid(text, "messages")
    return [_checked(each.path, each.url) for each in found]


def _parts(messages: object) -> Iterator[tuple[Path, object]]:
    """The content parts of a conversation, and their paths; a content without parts is one."""
    for number, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.get("content") if isinstance(message, dict) else message
        path = ("messages", number, "content")
        if isinstance(content, list):
            yield from (((*path, position), part) for position, part in enumerate(content))
        else:
            yield path, content


def _is_image(part: object) -> bool:
    return isinstance(part, dict) and "image_url" in part and "text" not in part


def _of_cohere(request: Json) -> list[ImageRef]:
    if request.get("texts"):
        raise invalid(_NO_TEXT, "texts")
    images, inputs = request.get("images"), request.get("inputs")
    if bool(images) == bool(inputs):
        raise invalid("expected either `images` or `inputs`", "images")
    field, values = ("images", images) if images else ("inputs", inputs)
    if not isinstance(values, list):
        raise invalid("expected a list", field)
    read = _checked if images else _of_content
    return [read((field, number), each) for number, each in enumerate(values)]


def _of_content(path: Path, value: object) -> ImageRef:
    """The image of one of Cohere's inputs."""
    path = (*path, "content")
    parts = value.get("content") if isinstance(value, dict) else None
    if not isinstance(parts, list) or not parts:
        expected = 'expected [{"type": "image_url", "image_url": {"url": ...}}]'
        raise invalid(expected, param_of(path), "invalid_image_url")
    for number, part in enumerate(parts):
        if not _is_image(part):
            raise invalid(_NO_TEXT, param_of((*path, number)))
    if len(parts) != 1:
        raise invalid(f"an input has one embedding, and this one has {len(parts)} images", param_of(path))
    image = parts[0]["image_url"]
    return _checked((*path, 0, "image_url"), image.get("url") if isinstance(image, dict) else image)


def _checked(path: Path, url: object) -> ImageRef:
    """An image that has a URL of a known kind. Raises ApiError for texts."""
    if not isinstance(url, str):
        text = f"expected a data URI or URL of an image; {_NO_TEXT}"
    elif url[:8].partition(":")[0].lower() not in ("data", "http", "https"):
        text = NO_HEAD if is_bare(url) else f"neither a data URI nor a URL of an image; {_NO_TEXT}"
    else:
        return ImageRef(path, url)
    raise invalid(text, param_of(path), "invalid_image_url")


def _choice(request: Json, name: str, choices: Sequence[str]) -> str:
    value = request.get(name)
    if value is None:
        return choices[0]
    if not isinstance(value, str) or value not in choices:
        raise invalid(f"expected {' or '.join(choices)}", name)
    return value


def _dimensions(request: Json, name: str) -> int | None:
    value = request.get(name)
    if value is None:
        return None
    if type(value) is not int or not 0 < value < _MAX_DIMENSIONS:
        raise invalid("expected a positive integer", name)
    return value
