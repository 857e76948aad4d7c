"""The APIs whose requests may have images: their paths, their forms, and what the engine takes."""

from functools import partial
from typing import NamedTuple

from vitwire_gateway.anthropic import messages
from vitwire_gateway.anthropic.chat_requests import chat_request
from vitwire_gateway.gateway_settings import RouterSettings
from vitwire_gateway.openai import chat, responses
from vitwire_gateway.openai.chat import RequestForm
from vitwire_gateway.openai.content_parts import Api, Dialect, dialect_of

CHAT = "/v1/chat/completions"


class ImageApi(NamedTuple):
    """An API whose requests may have images."""

    name: Api
    path: str
    form: RequestForm
    dialect: Dialect


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
