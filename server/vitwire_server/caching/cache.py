"""Embeddings by content, so that the same content is encoded once."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from vitwire_server.core.delivery import DeviceRows
from vitwire_server.core.errors import EncodeFailed
from vitwire_server.core.grids import Grid
from vitwire_server.core.items import DType, Embedding, Modality

_OVERHEAD = 1024
"""Estimated bytes that an embedding takes in addition to its rows."""
_NAME_OVERHEAD = 512
_NOTHING = memoryview(b"")


class Content(NamedTuple):
    """The content of an item, and the form it was sent in."""

    modality: Modality
    grid: Grid
    forms: tuple[tuple[DType, tuple[int, ...]], ...]
    """Type and shape of each of its tensors."""
    digest: bytes
    """Digest of the bytes of all its tensors."""


class Key(NamedTuple):
    """All that determines the rows of an item, and who may read them."""

    principal: str
    fingerprint: str
    """Fingerprint of the tower's weights."""
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


Fetching = Callable[[memoryview | EncodeFailed], None]
"""Receives a copy of rows on the host, or why there is none, on the event loop."""
Download = Callable[[DeviceRows, Fetching], None]
"""Copies rows from the device to the host; see `downloads.py`."""
Changed = Callable[[int, int, int], None]
"""Receives the bytes held on the host and on the device, and the number of embeddings that were evicted."""


@dataclass(slots=True, eq=False)
class _Entry:
    key: Key
    embedding: Embedding
    names: set[Name] = field(default_factory=set)
    is_leaving: bool = False
    """Whether the rows are being copied from the device to the host, where they count already."""

    @property
    def nbytes(self) -> int:
        on_host = self.is_leaving or self.embedding.is_on_host
        return nbytes_of(on_host * self.embedding.nbytes, *(name.content_id for name in self.names))


def nbytes_of(rows: int, *content_ids: str) -> int:
    """Bytes that an embedding takes on the host, with `rows` bytes of rows there and these names."""
    return _OVERHEAD + rows + sum(_NAME_OVERHEAD + len(content_id) for content_id in content_ids)


class EmbeddingCache:
    """Evicts the least recently used embeddings at a bound on bytes. Used on the event loop only.

    Rows that come on the device stay there, within a separate bound. The least recently used ones move to the host,
    and are found on the device until they are complete there. Rows that were copied to the host for a request stay in
    both places.

    A name refers to the content that it was last sent with. Names are per principal, as keys are, and are
    evicted with their embedding.
    """

    def __init__(
        self,
        max_bytes: int,
        changed: Changed = lambda *_: None,
        *,
        max_stored: int = 0,
        download: Download | None = None,
    ) -> None:
        """At most `max_bytes` on the host, of which 0 cache nothing, and `max_stored` on the device.

        `download` is needed if rows come on the device.
        """
        self.is_on = max_bytes > 0
        """Whether anything is ever cached."""
        self.nbytes = 0
        """Bytes held on the host, names and bookkeeping included."""
        self.stored_nbytes = 0
        """Bytes held on the device, without rows that are being copied to the host."""
        self._max_bytes, self._max_stored = max_bytes, max_stored
        self._changed = changed
        self._download = download
        self._entries: dict[Key, _Entry] = {}
        self._named: dict[Name, _Entry] = {}
        self._on_host: OrderedDict[_Entry, None] = OrderedDict()
        """Entries whose rows count on the host, the least recently used first."""
        self._stored: OrderedDict[DeviceRows, _Entry] = OrderedDict()
        """Entries whose rows count on the device, in the same order; each entry is in one of the two, or in both."""

    def get(self, key: Key, name: Name | None = None) -> Embedding | None:
        """The embedding, marked as the most recently used one; `name` refers to it from now on."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._use(entry)
        if name:
            self._set_name(name, entry)
            self._shrink()
        return entry.embedding

    def find(self, name: Name) -> tuple[Key, Embedding] | None:
        """The embedding of the content that `name` refers to, if it is still cached."""
        entry = self._named.get(name)
        if entry is None:
            return None
        self._use(entry)
        return entry.key, entry.embedding

    def put(self, key: Key, embedding: Embedding, names: set[Name]) -> None:
        """Cache the rows, unless they are larger than the cache; `names` refer to them from now on.

        Rows on the host are copied, those on the device are shared. Rows that are cached already stay, and so do
        their names: equal keys have equal rows.
        """
        if self.get(key) is None and nbytes_of(embedding.nbytes) <= self._max_bytes:
            self._add(key, embedding)
        entry = self._entries.get(key)
        for name in names:
            if entry:
                self._set_name(name, entry)
            else:  # it refers to this content, not to older pixels
                self._forget(name)
        self._shrink()

    def fetch(self, rows: DeviceRows, done: Fetching) -> None:
        """Copy rows to the host; `done` gets the copy, or an error. An embedding that is cached keeps it as well."""
        assert self._download, "rows came on the device"

        def fetched(found: memoryview | EncodeFailed) -> None:
            entry = self._stored.get(rows)
            if entry and entry not in self._on_host and not isinstance(found, EncodeFailed):
                self._on_host[entry] = None
                with self._resizing(entry):
                    entry.embedding = replace(entry.embedding, data=found)
                self._shrink()
            done(found)

        self._download(rows, fetched)

    def _use(self, entry: _Entry) -> None:
        if entry in self._on_host:
            self._on_host.move_to_end(entry)
        if (rows := entry.embedding.device) and rows in self._stored:
            self._stored.move_to_end(rows)

    def _add(self, key: Key, embedding: Embedding) -> None:
        entry = self._entries[key] = _Entry(key, embedding)
        if embedding.device:
            self._stored[embedding.device] = entry
            self.stored_nbytes += embedding.device.taken
        else:  # the rows' buffer may be pinned memory, which is scarce, or larger than the rows
            self._on_host[entry] = None
            entry.embedding = replace(embedding, data=memoryview(bytes(embedding.data)))
        self.nbytes += entry.nbytes

    def _set_name(self, name: Name, entry: _Entry) -> None:
        """Let `name` refer to this entry only."""
        if self._named.get(name) is not entry:
            self._forget(name)
            self._named[name] = entry
            with self._resizing(entry):
                entry.names.add(name)

    def _forget(self, name: Name) -> None:
        if entry := self._named.pop(name, None):
            with self._resizing(entry):
                entry.names.discard(name)

    @contextmanager
    def _resizing(self, entry: _Entry) -> Iterator[None]:
        before = entry.nbytes
        yield
        self.nbytes += entry.nbytes - before

    def _shrink(self) -> None:
        leaving: list[_Entry] = []
        while self.stored_nbytes > self._max_stored:
            leaving.append(self._unstore(next(iter(self._stored))))
        evicted = 0
        while self.nbytes > self._max_bytes:
            # If embeddings on the device, with a name each, take half of the host, its rows would leave for them.
            is_crowded = len(self._stored) * (_OVERHEAD + _NAME_OVERHEAD) > self._max_bytes // 2
            order = self._stored.values() if is_crowded or not self._on_host else self._on_host
            evicted += self._evict(next(iter(order)))
        self._changed(self.nbytes, self.stored_nbytes, evicted)
        for entry in leaving:
            if entry.is_leaving and self._entries.get(entry.key) is entry:
                assert entry.embedding.device and self._download, "rows came on the device"  # noqa: PT018
                self._download(entry.embedding.device, partial(self._left, entry))

    def _unstore(self, rows: DeviceRows) -> _Entry:
        """Rows do not count on the device any more: they are on the host already, or are to be copied there."""
        entry = self._stored.pop(rows)
        self.stored_nbytes -= rows.taken
        with self._resizing(entry):
            if entry in self._on_host:
                entry.embedding = replace(entry.embedding, device=None)
            else:
                entry.is_leaving = True
                self._on_host[entry] = None
        return entry

    def _left(self, entry: _Entry, found: memoryview | EncodeFailed) -> None:
        """The rows of an entry were copied to the host."""
        if self._entries.get(entry.key) is not entry:  # evicted meanwhile
            return
        if isinstance(found, EncodeFailed):
            self._remove(entry)
        else:
            entry.embedding = replace(entry.embedding, data=found, device=None)
            entry.is_leaving = False
        self._shrink()

    def _evict(self, entry: _Entry) -> bool:
        """Drop the rows on the host; whether the embedding is gone, as it is not on the device."""
        if entry.embedding.device not in self._stored or entry not in self._on_host:
            self._remove(entry)
            return True
        del self._on_host[entry]
        with self._resizing(entry):
            entry.embedding = replace(entry.embedding, data=_NOTHING)
        return False

    def _remove(self, entry: _Entry) -> None:
        if (rows := entry.embedding.device) and self._stored.pop(rows, None):
            self.stored_nbytes -= rows.taken
        self._on_host.pop(entry, None)
        del self._entries[entry.key]
        self.nbytes -= entry.nbytes
        for name in entry.names:
            del self._named[name]
