"""Keys of the embedding cache, and the digests in them: of 16 bytes, with a seed that nobody knows beforehand."""

import asyncio
from collections.abc import Mapping, Sequence

from xxhash import xxh3_128

from vitwire_server.caching.cache import Content, Key, Name
from vitwire_server.core.items import CacheLookup, Item

Buffer = memoryview | bytes | bytearray
_LARGE_BYTES = 4 << 20


def parts_of(item: Item) -> list[Buffer]:
    """The bytes of an item: its pixels, then its crops."""
    return [tensor.data for tensor in (item.pixels, item.crops) if tensor]


def digest_of(parts: Sequence[Buffer], seed: int) -> bytes:
    digest = xxh3_128(seed=seed)
    for part in parts:
        digest.update(part)
    return digest.digest()


async def digests_of(contents: Mapping[int, Sequence[Buffer]], seed: int) -> dict[int, bytes]:
    """The digest of each content. A thread computes them if they are large."""

    def digests() -> dict[int, bytes]:
        return {number: digest_of(parts, seed) for number, parts in contents.items()}

    if sum(len(part) for parts in contents.values() for part in parts) <= _LARGE_BYTES:
        return digests()
    return await asyncio.to_thread(digests)


def key_of(item: Item, digest: bytes, principal: str, fingerprint: str) -> Key:
    """The key of an item's embedding."""
    forms = tuple((tensor.dtype, tensor.shape) for tensor in (item.pixels, item.crops) if tensor)
    return Key(principal, fingerprint, item.output, item.keep_ratio, Content(item.modality, item.grid, forms, digest))


def name_of(item: Item | CacheLookup, principal: str, fingerprint: str) -> Name | None:
    """The name that the client gave the item, if any."""
    if not item.content_id:
        return None
    return Name(principal, fingerprint, item.output, item.keep_ratio, item.content_id)
