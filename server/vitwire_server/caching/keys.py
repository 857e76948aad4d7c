"""Keys of the embedding cache."""

from xxhash import xxh3_128

from vitwire_server.caching.cache import Content, Key, Name
from vitwire_server.core.items import CacheLookup, Item


class Digest:
    """The digest of bytes that arrive in chunks."""

    def __init__(self, seed: int) -> None:
        """`seed` of 64 bits is random per server, so that collisions cannot be prepared."""
        self._hash = xxh3_128(seed=seed)

    def add(self, data: memoryview | bytes | bytearray) -> None:
        """The next bytes."""
        self._hash.update(data)

    def value(self) -> bytes:
        """16 bytes."""
        return self._hash.digest()


def digest_of(item: Item, seed: int) -> bytes:
    """The digest of all bytes of an item: its pixels, then its crops."""
    digest = Digest(seed)
    digest.add(item.pixels.data)
    if item.crops:
        digest.add(item.crops.data)
    return digest.value()


def key_of(item: Item, digest: bytes, principal: str, fingerprint: str) -> Key:
    """The key of an item's embedding."""
    forms = tuple((tensor.dtype, tensor.shape) for tensor in (item.pixels, item.crops) if tensor)
    return Key(principal, fingerprint, item.output, item.keep_ratio, Content(item.modality, item.grid, forms, digest))


def name_of(item: Item | CacheLookup, principal: str, fingerprint: str) -> Name | None:
    """The name that the client gave the item, if any."""
    if not item.content_id:
        return None
    return Name(principal, fingerprint, item.output, item.keep_ratio, item.content_id)
