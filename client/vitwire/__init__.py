"""Client of Vitwire, a vision encoder as a service.

    from vitwire import Client

    with Client("localhost:50051") as client:
        embeddings = client.encode_images(["cat.jpg", "dog.jpg"])

`AsyncClient` is the same for asyncio.
"""

from importlib.metadata import PackageNotFoundError, version

from vitwire._delivery.answers import Accepted, Result, Stored
from vitwire.aio import AsyncClient
from vitwire.client import Client
from vitwire.embeddings import DType, Embedding, Report, RowGroup
from vitwire.errors import (
    DeadlineExceeded,
    EncodeFailed,
    InvalidItem,
    NotCached,
    Overloaded,
    Unauthenticated,
    Unavailable,
    Violation,
    VitwireError,
)
from vitwire.items import Item, Modality, Priority
from vitwire.model import Budget, Limits, Model, TileShapes
from vitwire.options import ProcessorOptions

__all__ = [
    "Accepted",
    "AsyncClient",
    "Budget",
    "Client",
    "DType",
    "DeadlineExceeded",
    "Embedding",
    "EncodeFailed",
    "InvalidItem",
    "Item",
    "Limits",
    "Modality",
    "Model",
    "NotCached",
    "Overloaded",
    "Priority",
    "ProcessorOptions",
    "Report",
    "Result",
    "RowGroup",
    "Stored",
    "TileShapes",
    "Unauthenticated",
    "Unavailable",
    "Violation",
    "VitwireError",
]

try:
    __version__ = version("vitwire")
except PackageNotFoundError:  # a checkout that is not installed
    __version__ = "0.0.0"
