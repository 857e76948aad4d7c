"""The APIs for embeddings of images: their paths, and the forms of their requests and answers."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from vitwire import Model
from vitwire_gateway.embeddings.embedding_answers import (
    Answer,
    check_cohere,
    check_openai,
    cohere_answer,
    openai_answer,
)
from vitwire_gateway.embeddings.embedding_requests import (
    EmbeddingOptions,
    EmbeddingRequest,
    cohere_request,
    openai_request,
)


class EmbeddingApi(NamedTuple):
    """An API for embeddings of images."""

    path: str
    read: Callable[..., EmbeddingRequest | None]
    """As `openai_request`; None: the engine's."""
    check: Callable[[EmbeddingOptions, Model], None]
    """Raises ApiError for options that the model does not offer."""
    answer: Callable[[Answer], Iterator[bytes]]
    is_shared: bool = False
    """An engine gets requests that are not of images."""


def embedding_apis(*, has_engine: bool) -> list[EmbeddingApi]:
    """OpenAI's and Cohere's. An engine gets the requests in OpenAI's form that have text."""
    read = partial(openai_request, has_engine=has_engine)
    return [
        EmbeddingApi("/v1/embeddings", read, check_openai, openai_answer, has_engine),
        EmbeddingApi("/v2/embed", cohere_request, check_cohere, cohere_answer),
    ]
