"""Vitwire: a vision encoder as a service. This is its client.

    from vitwire import Client

    with Client("localhost:50051") as client:
        embeddings = client.encode_images(["cat.jpg", "dog.jpg"])

`AsyncClient` is its twin for asyncio.
"""

from importlib.metadata import PackageNotFoundError, version

from vitwire._aio import AsyncClient
from vitwire._client import Client
from vitwire._embedding import Embedding
from vitwire._errors import (
    DeadlineExceeded,
    EncodeFailed,
    InvalidItem,
    NotCached,
    Overloaded,
    Unauthenticated,
    Unavailable,
    VitwireError,
)
from vitwire._items import Item
from vitwire._model import Model

__all__ = [
    "AsyncClient",
    "Client",
    "DeadlineExceeded",
    "Embedding",
    "EncodeFailed",
    "InvalidItem",
    "Item",
    "Model",
    "NotCached",
    "Overloaded",
    "Unauthenticated",
    "Unavailable",
    "VitwireError",
]

try:
    __version__ = version("vitwire")
except PackageNotFoundError:  # run from a checkout that is not installed
    __version__ = "0.0.0"
