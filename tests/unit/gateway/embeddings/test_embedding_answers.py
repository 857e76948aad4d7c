"""Vectors of images as JSON: in pieces that make the same document as one `json.dumps`."""

import base64
import json
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from client_models import described
from vitwire import Embedding, Model
from vitwire.embeddings import Report
from vitwire_gateway.api_errors import ApiError
from vitwire_gateway.embeddings.embedding_answers import (
    Answer,
    Vectors,
    check_cohere,
    check_openai,
    cohere_answer,
    openai_answer,
    vectors_of,
)
from vitwire_gateway.embeddings.embedding_requests import EmbeddingOptions

EVERY_TOKEN = described(tiling=False)
POOLED = replace(described(tiling=True), pooling="cls", model_id='a "clip"')


def read(pieces: Iterator[bytes]) -> dict[str, object]:
    found: dict[str, object] = json.loads(b"".join(pieces))
    return found


def answer(model: Model, kind: str, *rows: np.ndarray) -> Answer:
    return Answer(EmbeddingOptions((kind,)), model, [Vectors(each, 16) for each in rows], "r-1")


def embedding(rows: object, levels: int = 0) -> Embedding:
    return Embedding(np.array(rows, np.float32), "float32", levels, Report(), (1, 4, 4))


@pytest.mark.parametrize("count", [1, 2, 5000])
def test_vectors_of_every_token_in_pieces(count: int) -> None:
    rows = np.random.default_rng(0).standard_normal((count, 37), np.float32)
    pieces = list(openai_answer(answer(EVERY_TOKEN, "float", rows, rows[:1])))
    first, second = json.loads(b"".join(pieces))["data"]
    assert (first["shape"], second["shape"]) == ([count, 37], [1, 37])
    np.testing.assert_array_equal(np.array(first["embedding"], np.float32), rows)
    assert max(map(len, pieces)) < 200_000
    pieces = list(openai_answer(answer(EVERY_TOKEN, "base64", rows)))
    (only,) = json.loads(b"".join(pieces))["data"]
    assert base64.b64decode(only["embedding"], validate=True) == rows.astype("<f4").tobytes()
    assert max(map(len, pieces)) <= 1 << 18


def test_the_form_of_openai() -> None:
    row = np.array([[0.5, -1.25]], np.float32)
    assert read(openai_answer(answer(POOLED, "float", row, row))) == {
        "object": "list",
        "data": [{"object": "embedding", "index": index, "embedding": [0.5, -1.25]} for index in (0, 1)],
        "model": 'a "clip"',
        "usage": {"prompt_tokens": 32, "total_tokens": 32},
    }


def test_the_form_of_cohere() -> None:
    row = np.array([[1, -1, 0.5, -0.5, 0, -0.0, 2, -2, -1, -1, -1, -1, -1, -1, -1, 1]], np.float32)
    found = read(cohere_answer(replace_types(answer(POOLED, "float", row), "ubinary", "binary", "float")))
    assert found == {
        "id": "r-1",
        "response_type": "embeddings_by_type",
        "embeddings": {"ubinary": [[0b10101110, 1]], "binary": [[0b10101110 - 128, -127]], "float": row.tolist()},
        "meta": {"api_version": {"version": "2"}, "billed_units": {"images": 1, "image_tokens": 16}},
    }


def replace_types(found: Answer, *types: str) -> Answer:
    return found._replace(options=EmbeddingOptions(types))


def test_vectors_are_cut_and_then_normalised() -> None:
    rows, options = [[3, 4, 12]], EmbeddingOptions(("float",), 2)
    np.testing.assert_allclose(vectors_of(embedding(rows), POOLED, options).rows, [[0.6, 0.8]])
    np.testing.assert_array_equal(vectors_of(embedding(rows), POOLED, options._replace(normalize=False)).rows, [[3, 4]])
    np.testing.assert_array_equal(vectors_of(embedding([[0, 0]]), POOLED, EmbeddingOptions(("float",))).rows, [[0, 0]])
    several = embedding([[3, 4, 9, 9], [0, 5, 9, 9]], levels=1)
    found = vectors_of(several, EVERY_TOKEN, EmbeddingOptions(("float",)))
    np.testing.assert_array_equal(found.rows, [[3, 4], [0, 5]])
    assert found.tokens == 2
    found = vectors_of(several, EVERY_TOKEN, EmbeddingOptions(("float",), normalize=True))
    np.testing.assert_allclose(found.rows, [[0.6, 0.8], [0, 1]])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_json_cannot_carry(value: float) -> None:
    with pytest.raises(ApiError, match="not finite") as caught:
        vectors_of(embedding([[1, value]]), POOLED, EmbeddingOptions(("float",)))
    assert (caught.value.status, caught.value.code) == (502, "encoder_failed")


def test_tokens_before_pooling() -> None:
    """A tile of 56 x 56 in patches of 14; of patches by the grid."""
    row = embedding([[1.0] * 8])
    assert vectors_of(row, POOLED, EmbeddingOptions(("float",))).tokens == 16
    assert (
        vectors_of(row, replace(EVERY_TOKEN, pooling="attention", merge_size=2), EmbeddingOptions(("float",))).tokens
        == 4
    )


@pytest.mark.parametrize(
    ("lengths", "dimensions", "reason"),
    [
        (None, 8, None),
        (None, 4, "may not be cut, as its config.json has no matryoshka_dimensions"),
        ((), 3, None),
        ((), 9, "have 8 columns, got 9"),
        ((2, 4), 4, None),
        ((2, 4), 3, r"offers 2, 4 \(its matryoshka_dimensions\), got 3"),
        ((2, 16), 16, "have 8 columns, got 16"),
    ],
)
def test_lengths_that_a_model_offers(lengths: tuple[int, ...] | None, dimensions: int, reason: str | None) -> None:
    model = replace(POOLED, matryoshka=lengths)
    for check, field in ((check_openai, "dimensions"), (check_cohere, "output_dimension")):
        if reason is None:
            check(EmbeddingOptions(("float",), dimensions), model)
            continue
        with pytest.raises(ApiError, match=reason) as caught:
            check(EmbeddingOptions(("float",), dimensions), model)
        assert caught.value.param == field


def test_bits_need_whole_bytes() -> None:
    model = replace(POOLED, matryoshka=())
    check_cohere(EmbeddingOptions(("binary",)), model)
    check_cohere(EmbeddingOptions(("float",), 4), model)
    with pytest.raises(ApiError, match="embedding_types: binary vectors need a multiple of 8 columns, got 4"):
        check_cohere(EmbeddingOptions(("float", "ubinary"), 4), model)
