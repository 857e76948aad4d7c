"""Embeddings by content, so that the same content is encoded once."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from vitwire_server.core.grids import Grid
from vitwire_server.core.items import DType, Embedding, Modality

_OVERHEAD = 1024
"""Estimated bytes that an embedding takes beside its rows."""
_NAME_OVERHEAD = 512


class Content(NamedTuple):
    """The content of an item, and the form it was sent in."""

    modality: Modality
    grid: Grid
    forms: tuple[tuple[DType, tuple[int, ...]], ...]
    """Type and shape of each of its tensors."""
    digest: bytes
    """Of the bytes of all its tensors."""


class Key(NamedTuple):
    """All that determines the rows of an item, and who may read them."""

    principal: str
    fingerprint: str
    """Of the tower's weights."""
    output: DType
    keep_ratio: float
    content: Content


class Name(NamedTuple):
    """A content_id of one principal, and the form of the rows requested."""

    principal: str
    fingerprint: str
    output: DType
    keep_ratio: float
    content_id: str


@dataclass(slots=True)
class _Entry:
    embedding: Embedding
    names: set[Name] = field(default_factory=set)

    @property
    def nbytes(self) -> int:
        return nbytes_of(len(self.embedding.data), *(name.content_id for name in self.names))


def nbytes_of(rows: int, *content_ids: str) -> int:
    """Bytes that an embedding takes in the cache, with `rows` bytes of rows and these names."""
    return _OVERHEAD + rows + sum(_NAME_OVERHEAD + len(content_id) for content_id in content_ids)


class EmbeddingCache:
    """Evicts the least recently used embeddings at a bound on bytes. Used on the event loop only.

    A name refers to the content that it was last sent with. Names are per principal, as keys are, and are
    evicted with their embedding.
    """

    def __init__(self, max_bytes: int, changed: Callable[[int, int], None] = lambda *_: None) -> None:
        """0 bytes cache nothing. `changed` is called with the bytes held and the number of evicted embeddings."""
        self._max_bytes = max_bytes
        self._changed = changed
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._keys: dict[Name, Key] = {}
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def is_on(self) -> bool:
        """Whether anything is ever cached."""
        return self._max_bytes > 0

    @property
    def nbytes(self) -> int:
        """Bytes held, names and bookkeeping included."""
        return self._nbytes

    def get(self, key: Key, name: Name | None = None) -> Embedding | None:
        """The embedding, marked as the most recently used one; `name` refers to it from now on."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        if name:
            self._set_name(name, key, entry)
            self._shrink()
        return entry.embedding

    def find(self, name: Name) -> tuple[Key, Embedding] | None:
        """The embedding of the content that `name` refers to, if it is still cached."""
        key = self._keys.get(name)
        if key is None:
            return None
        self._entries.move_to_end(key)
        return key, self._entries[key].embedding

    def put(self, key: Key, embedding: Embedding, names: set[Name]) -> None:
        """Cache a copy of the rows, unless they are larger than the cache; `names` refer to them from now on.

        Rows that are cached already stay, and so do their names: equal keys have equal rows.
        """
        if self.get(key) is None and not self._add(key, embedding):
            for name in names:  # they refer to this content, not to older pixels
                self._forget(name)
        else:
            for name in names:
                self._set_name(name, key, self._entries[key])
        self._shrink()

    def _add(self, key: Key, embedding: Embedding) -> bool:
        """Add a copy of the rows; False if they are larger than the cache."""
        if _Entry(embedding).nbytes > self._max_bytes:
            return False
        # The rows' buffer may be pinned memory, which is scarce, or larger than the rows.
        entry = _Entry(Embedding(memoryview(bytes(embedding.data)), embedding.dtype, embedding.shape, embedding.kept))
        self._entries[key] = entry
        self._nbytes += entry.nbytes
        return True

    def _set_name(self, name: Name, key: Key, entry: _Entry) -> None:
        """Let `name` refer to `key` only."""
        if self._keys.get(name) == key:
            return
        self._forget(name)
        self._keys[name] = key
        self._resize(entry, lambda names: names.add(name))

    def _forget(self, name: Name) -> None:
        former = self._keys.pop(name, None)
        if former is not None:
            self._resize(self._entries[former], lambda names: names.discard(name))

    def _resize(self, entry: _Entry, change: Callable[[set[Name]], None]) -> None:
        before = entry.nbytes
        change(entry.names)
        self._nbytes += entry.nbytes - before

    def _shrink(self) -> None:
        evicted = 0
        while self._nbytes > self._max_bytes:
            self._remove(next(iter(self._entries)))
            evicted += 1
        self._changed(self._nbytes, evicted)

    def _remove(self, key: Key) -> None:
        entry = self._entries.pop(key)
        self._nbytes -= entry.nbytes
        for name in entry.names:
            del self._keys[name]
