"""Vectors from embeddings, and answers with them in OpenAI's and Cohere's form. Pure functions."""

import json
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from vitwire import Embedding, Model
from vitwire.embeddings import Float32
from vitwire_gateway.api_errors import ApiError, invalid
from vitwire_gateway.embeddings.embedding_requests import EmbeddingOptions

_BASE64_BYTES = 3 << 16
"""Bytes of vectors that become base64 at a time; a multiple of 3, so that no padding comes in between."""
_LIST_BYTES = 16 << 10
"""Bytes of vectors that become numbers in JSON at a time, which takes about 2 ms."""
_BITS = 8


class Vectors(NamedTuple):
    """The vectors of one image."""

    rows: Float32
    """`(vectors, columns)`."""
    tokens: int
    """Tokens of the image in the tower."""


class Answer(NamedTuple):
    options: EmbeddingOptions
    model: Model
    images: Sequence[Vectors | ApiError]
    """One per image of the request, in order; errors if the options want them by item."""
    request_id: str

    @property
    def tokens(self) -> int:
        """Tokens of all images."""
        return sum(each.tokens for each in self.vectors)

    @property
    def vectors(self) -> list[Vectors]:
        """The vectors of images that have no error, in order."""
        return [each for each in self.images if isinstance(each, Vectors)]


def check_openai(options: EmbeddingOptions, model: Model) -> None:
    """Raises ApiError for what the model does not offer."""
    _check_dimensions(options, model, "dimensions")


def check_cohere(options: EmbeddingOptions, model: Model) -> None:
    """Raises ApiError for what the model does not offer, or Cohere's form cannot express."""
    if model.pooling == "none":
        text = (
            "Cohere's API has one vector per image, and the encoder returns one per token, as it runs without "
            "--pooling: use /v1/embeddings"
        )
        raise ApiError(400, text, "several_vectors")
    _check_dimensions(options, model, "output_dimension")
    columns = options.dimensions or _columns(model)
    if columns % _BITS and not {"binary", "ubinary"}.isdisjoint(options.types):
        raise invalid(f"binary vectors need a multiple of {_BITS} columns, got {columns}", "embedding_types")


def vectors_of(embedding: Embedding, model: Model, options: EmbeddingOptions) -> Vectors:
    """The vectors by the options: without deepstack levels, cut, then normalised. Raises ApiError for NaN."""
    rows = embedding.main[:, : options.dimensions]
    if not np.isfinite(rows).all():
        raise ApiError(502, "the encoder returned numbers that are not finite", "encoder_failed")
    if options.normalize or (options.normalize is None and model.pooling != "none"):
        norms = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
        rows = (rows / np.where(norms == 0, 1, norms)).astype(np.float32)
    return Vectors(np.ascontiguousarray(rows, "<f4"), model.tokens(embedding.grid, embedding.shape[0]))


def openai_answer(answer: Answer) -> Iterator[bytes]:
    """The pieces of a body in OpenAI's form. Images with several vectors have their `shape` in addition."""
    (kind,) = answer.options.types
    yield b'{"object":"list","data":['
    for index, image in enumerate(answer.images):
        if isinstance(image, ApiError):
            yield f'{"," if index else ""}{{"object":"embedding","index":{index},"embedding":null,'.encode()
            yield image.body[1:]
            continue
        rows = image.rows
        several = answer.model.pooling == "none" or len(rows) != 1
        shape = f'"shape":{json.dumps(rows.shape)},' if several else ""
        yield f'{"," if index else ""}{{"object":"embedding","index":{index},{shape}"embedding":'.encode()
        if kind == "base64":
            yield from _base64(rows)
        else:
            yield from _lists(rows.tolist() for rows in _slices(rows)) if several else [_json(rows[0].tolist())]
        yield b"}"
    usage = {"prompt_tokens": answer.tokens, "total_tokens": answer.tokens}
    yield b'],"model":' + _json(answer.model.model_id) + b',"usage":' + _json(usage) + b"}"


def cohere_answer(answer: Answer) -> Iterator[bytes]:
    """The pieces of a body in Cohere's form."""
    yield b'{"id":' + _json(answer.request_id) + b',"response_type":"embeddings_by_type","embeddings":{'
    for number, kind in enumerate(answer.options.types):
        yield f'{"," if number else ""}"{kind}":'.encode()
        yield from _lists([_cohere_value(each.rows[0], kind)] for each in answer.vectors)
    units = {"images": len(answer.images), "image_tokens": answer.tokens}
    yield b'},"meta":' + _json({"api_version": {"version": "2"}, "billed_units": units}) + b"}"


def _cohere_value(row: Float32, kind: str) -> object:
    """A vector in one of Cohere's forms; bits are the signs, the first one highest, and `binary` is `ubinary` - 128."""
    match kind:
        case "float":
            return row.tolist()
        case "base64":
            return b64encode(row.tobytes()).decode()
        case _:
            packed = np.packbits(row >= 0).astype(np.int16)
            return (packed - 128 if kind == "binary" else packed).tolist()


def _check_dimensions(options: EmbeddingOptions, model: Model, param: str) -> None:
    dimensions, columns, lengths = options.dimensions, _columns(model), model.matryoshka
    if dimensions in (None, columns):
        return
    if lengths is None:
        one_per_token = model.pooling == "none"
        reason = "they are one per token" if one_per_token else "its config.json has no matryoshka_dimensions"
        text = f"the vectors of {model.model_id} have {columns} columns and may not be cut, as {reason}"
        raise invalid(text, param)
    if lengths and dimensions not in lengths:
        raise invalid(
            f"{model.model_id} offers {', '.join(map(str, lengths))} (its matryoshka_dimensions), got {dimensions}",
            param,
        )
    if dimensions > columns:
        raise invalid(f"the vectors of {model.model_id} have {columns} columns, got {dimensions}", param)


def _columns(model: Model) -> int:
    return model.embedding_width // (1 + model.deepstack_levels)


def _slices(rows: Float32) -> Iterator[Float32]:
    step = max(1, _LIST_BYTES // (rows.shape[1] * rows.itemsize))
    for start in range(0, len(rows), step):
        yield rows[start : start + step]


def _base64(rows: Float32) -> Iterator[bytes]:
    """A JSON string of the rows as little-endian float32, in C order."""
    content = rows.data.cast("B")
    yield b'"'
    for start in range(0, len(content), _BASE64_BYTES):
        yield b64encode(content[start : start + _BASE64_BYTES])
    yield b'"'


def _lists(parts: Iterable[Sequence[object]]) -> Iterator[bytes]:
    """A JSON list of the values of all parts."""
    yield b"["
    for number, part in enumerate(parts):
        yield (b"," if number else b"") + _json(part)[1:-1]
    yield b"]"


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
