"""Ids of cached content, made with a secret: whoever could guess an id could put other rows under it."""

import hashlib
import hmac
from pathlib import Path

from vitwire.items import Modality
from vitwire.model import Model
from vitwire.options import ProcessorOptions

_LEAST_BYTES, _MOST_BYTES = 32, 4096


def content_id(
    digest: bytes, modality: Modality, model: Model, key: bytes, options: ProcessorOptions | None = None
) -> str:
    """An id that equal files have under equal weights, preparation, options and key, and no others.

    digest: sha256 of the file.
    """
    given = options.given() if options else {}
    named = repr(sorted(given.items())) if given else ""
    recipe = (model.weights_fingerprint, model.dtype, model.preparation_fingerprint, modality, named)
    digests = [hashlib.sha256(each.encode()).digest() for each in recipe]
    return hmac.digest(key, b"".join((*digests, digest)), "sha256").hex()


def read_content_key(file: Path) -> bytes:
    """The secret in a file. Raises OSError and ValueError."""
    if not file.is_file():
        raise OSError("not a regular file")
    with file.open("rb") as opened:
        key = opened.read(_MOST_BYTES)
    if len(key) < _LEAST_BYTES:
        raise ValueError(f"the key has {len(key)} bytes, expected {_LEAST_BYTES} or more (openssl rand -hex 32)")
    return key
