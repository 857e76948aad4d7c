"""The APIs whose requests may have images: their paths, their forms, and what the engine takes."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from vitwire import Model
from vitwire_gateway.anthropic import messages
from vitwire_gateway.anthropic.chat_requests import chat_request
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
from vitwire_gateway.gateway_settings import RouterSettings
from vitwire_gateway.openai import chat, responses
from vitwire_gateway.requests.dialects import Api, Dialect, dialect_of
from vitwire_gateway.requests.request_reading import RequestForm

CHAT = "/v1/chat/completions"


class ImageApi(NamedTuple):
    """An API whose requests the engine answers, with embeddings in place of images."""

    name: Api
    path: str
    form: RequestForm
    dialect: Dialect


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


def image_apis(settings: RouterSettings) -> list[ImageApi]:
    """All of them. Raises ValueError for a mode that the engine does not have."""
    with_clips = settings.clips == "encode"
    in_chat = partial(chat.images_of, with_clips=with_clips)
    in_responses = partial(responses.images_of, engine=settings.engine, with_clips=with_clips)
    as_chat = chat_request if settings.engine == "vllm" else None  # whose /v1/messages takes no embeddings
    forms: list[tuple[Api, str, RequestForm]] = [
        ("chat", CHAT, RequestForm(in_chat)),
        ("responses", "/v1/responses", RequestForm(in_responses)),
        ("messages", messages.MESSAGES, RequestForm(messages.images_of, as_chat)),
    ]
    return [ImageApi(name, path, form, dialect_of(settings, name)) for name, path, form in forms]


def embedding_apis(*, has_engine: bool) -> list[EmbeddingApi]:
    """OpenAI's and Cohere's. An engine gets the requests in OpenAI's form that have text."""
    read = partial(openai_request, has_engine=has_engine)
    return [
        EmbeddingApi("/v1/embeddings", read, check_openai, openai_answer, has_engine),
        EmbeddingApi("/v2/embed", cohere_request, check_cohere, cohere_answer),
    ]
