"""Vitwire as the vision encoder of Dynamo's vLLM worker, for Qwen3-VL and Qwen3.5.

    python -m dynamo.vllm --model … --enable-multimodal --enable-mm-embeds \\
        --custom-encoder-class vitwire.integrations.dynamo.VitwireEncoder

docs/dynamo.md has the environment variables. Embeddings come over gRPC into this process's host memory, and vLLM copies
them to its device.
"""

import asyncio
import logging
import os
from contextlib import ExitStack
from pathlib import Path

import grpc
from dynamo.common.http import AiohttpClient, HttpConnectionError, HttpStatusError, HttpTimeoutError
from dynamo.common.http.media_reference import max_media_bytes
from dynamo.common.http.url_validator import UrlValidationPolicy, validate_url
from dynamo.llm import HttpError
from dynamo.llm.exceptions import InvalidArgument
from dynamo.vllm.multimodal_utils.custom_encoder import Preprocessed, Qwen3VLImageEncoding, VisionEncoderBackend
from transformers import AutoConfig

from vitwire.client import Client
from vitwire.embeddings import Embedding
from vitwire.errors import DeadlineExceeded, InvalidItem, Overloaded, Unavailable
from vitwire.items import Item
from vitwire.model import Model

_log = logging.getLogger(__name__)
_START_SECONDS = 600.0
"""For the server to start and load its model, as `--wait` of the command line."""
_FETCH_SECONDS = 30.0
"""For a URL, as in Dynamo's loader of images."""
_TIMEOUT = "20"


class VitwireEncoder(VisionEncoderBackend):  # type: ignore[misc]  # Dynamo has no type information
    """Encodes images with the Vitwire server at VITWIRE_TARGET.

    Dynamo calls `preprocess` for each image, in a pool of threads, and `forward_batch` for images of several requests,
    in one thread. `preprocess` does all the work, so that an error fails one request, no request waits for a batch of
    others, and the server batches the images of all workers.
    """

    preprocess_concurrency = 64
    """Images that are fetched and encoded at a time."""

    def build(self, model_id: str) -> None:
        """Connect, and wait for the server to be ready.

        Raises ValueError for wrong variables and for a server that does not fit the model, OSError for a file of
        certificates that cannot be read, and VitwireError if the server does not become ready.
        """
        logging.getLogger(AiohttpClient.__module__).setLevel(logging.WARNING)  # else it writes a line for each URL
        with ExitStack() as failing:
            client = failing.enter_context(_client())
            _log.info("waiting up to %.0f s for the server of %r", _START_SECONDS, client)
            model = client.with_options(wait_for_ready=True).model(_START_SECONDS)
            _check(model, model_id)
            failing.pop_all()
        self._client, self._width = client, model.embedding_width

    def preprocess(self, raw: str) -> Preprocessed:
        """The rows `(tokens, width)` on the CPU, in the server's dtype with deepstack levels, and the grid of an image.

        raw: `https:` or `data:` URL, within Dynamo's limits (DYN_MM_…).
        Raises InvalidArgument, which Dynamo's frontend answers with HTTP 400 and the message, for an image that cannot
        be fetched or encoded, and Dynamo's ValueError, a 400 without the message, for a URL outside its limits.
        Raises HttpError with 529 if the server is full and 503 if it is not available, TimeoutError (504) if it is
        late, and VitwireError (500) for anything else.
        """
        try:
            (embedding,) = self._client.encode([asyncio.run(_item(raw))])
        except InvalidItem as error:
            reasons = "; ".join(each.description for each in error.violations)
            raise InvalidArgument(f"image: {reasons or error}") from error
        except Overloaded as error:
            raise HttpError(529, str(error)) from error
        except Unavailable as error:
            raise HttpError(503, str(error)) from error
        except DeadlineExceeded as error:
            # Not HttpError 504, for which Dynamo's router takes this worker out of service for some seconds.
            raise TimeoutError(str(error)) from error
        return Preprocessed(self._encoding(embedding))

    def forward_batch(
        self,
        items: list[Qwen3VLImageEncoding],
        target_bucket: int | None = None,  # noqa: ARG002  # Dynamo never sets it
    ) -> list[Qwen3VLImageEncoding]:
        """The encodings, which `preprocess` made."""
        return items

    def close(self) -> None:
        """Cancel requests in flight and close the connections."""
        self._client.close()

    def _encoding(self, embedding: Embedding) -> Qwen3VLImageEncoding:
        if embedding.shape[1] != self._width:
            raise RuntimeError(f"the server changed its model: width {embedding.shape[1]}, expected {self._width}")
        return Qwen3VLImageEncoding(embedding.torch(), embedding.grid)


def _client() -> Client:
    ca, cert, key, token = (os.environ.get(f"VITWIRE_{name}") or None for name in ("CA", "CERT", "KEY", "TOKEN"))
    switch, timeout = os.environ.get("VITWIRE_TLS", "0"), os.environ.get("VITWIRE_TIMEOUT", _TIMEOUT)
    if switch not in ("0", "1"):
        raise ValueError(f"VITWIRE_TLS: expected 0 or 1, got {switch!r}")
    if not timeout.replace(".", "", 1).isdecimal() or not float(timeout):
        raise ValueError(f"VITWIRE_TIMEOUT: expected seconds, got {timeout!r}")
    if (cert is None) != (key is None):
        raise ValueError("VITWIRE_CERT and VITWIRE_KEY must be set together")
    tls: bool | str | grpc.ChannelCredentials = ca or switch == "1"
    if cert and key:
        root = Path(ca).read_bytes() if ca else None
        tls = grpc.ssl_channel_credentials(root, Path(key).read_bytes(), Path(cert).read_bytes())
    return Client(tls=tls, token=token, timeout=float(timeout))


def _check(model: Model, model_id: str) -> None:
    """Raises ValueError unless the server's embeddings are those that vLLM expects for this model."""
    config = AutoConfig.from_pretrained(model_id)
    vision = config.vision_config
    levels = len(getattr(vision, "deepstack_visual_indexes", None) or ())
    wanted = (config.model_type, vision.out_hidden_size * (1 + levels), vision.spatial_merge_size, "none")
    served = (model.model_type, model.embedding_width, model.merge_size, model.pooling)
    names = ("model type", "embedding width", "merge size", "pooling")
    triples = zip(names, served, wanted, strict=True)
    wrong = [f"{name} {got!r}, expected {want!r}" for name, got, want in triples if got != want]
    if wrong:
        raise ValueError(f"the Vitwire server of {model.model_id} does not fit {model_id}: {'; '.join(wrong)}")
    if "image" not in model.prepared:
        raise ValueError("the Vitwire server prepares no images: it runs with --decode-processes 0")


async def _item(url: str) -> Item:
    """The file at a URL. Raises as `preprocess`, and InvalidItem if it is empty."""
    policy = UrlValidationPolicy.from_env()
    if url[:5].lower() == "data:":
        await validate_url(url, policy)
        try:
            return Item.from_file(url, modality="image")
        except ValueError as error:
            raise InvalidArgument(f"image: {error}") from error
    http = AiohttpClient()
    try:
        content = await http.fetch_bytes(url, _FETCH_SECONDS, policy=policy, max_bytes=max_media_bytes())
    except HttpStatusError as error:
        raise InvalidArgument(f"image: its URL answered with HTTP status {error.status}") from error
    except HttpTimeoutError as error:
        raise InvalidArgument("image: its URL did not answer in time") from error
    except HttpConnectionError as error:
        raise InvalidArgument("image: no connection to the host of its URL") from error
    finally:
        await http.close()
    return Item(encoded=content)
