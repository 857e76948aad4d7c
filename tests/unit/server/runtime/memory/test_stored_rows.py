"""The cache keeps rows on the device and on the host, each within its bound."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from vitwire_server.caching.cache import Content, EmbeddingCache, Fetching, Key, Name, nbytes_of
from vitwire_server.core.delivery import DeviceRows
from vitwire_server.core.errors import EncodeFailed
from vitwire_server.core.grids import Grid
from vitwire_server.core.items import DType, Embedding, Modality
from vitwire_server.runtime.memory.outbox import Outbox

PAGE = 4096
ROWS = 1000
ENTRY = nbytes_of(ROWS, "1")
"""Bytes of an embedding on the host."""


class Downloads:
    """Those that were asked for, which the test completes."""

    def __init__(self) -> None:
        self.asked: list[tuple[DeviceRows, Fetching]] = []

    def __call__(self, rows: DeviceRows, done: Fetching, /) -> None:
        self.asked.append((rows, done))

    def complete(self, error: EncodeFailed | None = None) -> int:
        asked, self.asked = self.asked, []
        for rows, done in asked:
            done(error or rows.download())
        return len(asked)


class Rig:
    def __init__(self, max_bytes: int = 1 << 20, pages: int = 2, room: int = 64) -> None:
        self.outbox = Outbox(torch.device("cpu"), room * PAGE)
        self.downloads = Downloads()
        self.changes: list[tuple[int, int, int]] = []
        self.cache = EmbeddingCache(
            max_bytes, lambda *held: self.changes.append(held), max_stored=pages * PAGE, download=self.downloads
        )

    def put(self, content: int, *, on_device: bool = True) -> None:
        data = bytes([content]) * ROWS
        rows = self.outbox.copied(torch.tensor(list(data), dtype=torch.uint8)) if on_device else None
        view = memoryview(b"" if rows else data)
        self.cache.put(key(content), Embedding(view, DType.FLOAT32, (ROWS // 4, 1), device=rows), {name(content)})

    def find(self, content: int) -> Embedding | None:
        found = self.cache.find(name(content))
        return found[1] if found else None

    def places(self, *contents: int) -> list[str]:
        """Where the rows of each are: on the device, the host, both or neither. Does not use them."""
        entries = [self.cache._entries.get(key(each)) for each in contents]
        return [
            "" if each is None else "d" * bool(each.embedding.device) + "h" * bool(each.embedding.data)
            for each in entries
        ]

    @property
    def free(self) -> int:
        """Pages of the outbox without rows."""
        self.outbox.copied(torch.empty(0, dtype=torch.uint8))
        return self.outbox._regions.free // PAGE + 1

    def check(self) -> None:
        cache = self.cache
        assert cache.nbytes <= cache._max_bytes
        assert cache.stored_nbytes <= cache._max_stored
        assert cache.nbytes == sum(entry.nbytes for entry in cache._entries.values())
        assert cache.stored_nbytes == PAGE * len(cache._stored)
        assert all(entry.embedding.device is rows for rows, entry in cache._stored.items())
        assert {*cache._on_host, *cache._stored.values()} == set(cache._entries.values())
        assert {one for entry in cache._entries.values() for one in entry.names} == cache._named.keys()
        for entry in cache._entries.values():
            assert bool(entry.embedding.device) == (entry.embedding.device in cache._stored or entry.is_leaving)
            assert entry.embedding.is_on_host or not entry.embedding.data
        if self.changes:
            assert self.changes[-1][:2] == (cache.nbytes, cache.stored_nbytes)


def key(content: int) -> Key:
    form = Content(Modality.IMAGE, Grid(1, 2, 2), ((DType.UINT8, (4, 12)),), bytes([content]))
    return Key("", "weights", DType.FLOAT32, 0.0, form)


def name(content: int) -> Name:
    return Name("", "weights", DType.FLOAT32, 0.0, str(content))


def test_rows_on_the_device_take_no_room_on_the_host() -> None:
    rig = Rig(max_bytes=2 * ENTRY)
    rig.put(1)
    rig.put(2)
    assert rig.places(1, 2) == ["d", "d"]
    assert rig.cache.nbytes == 2 * nbytes_of(0, "1")
    assert rig.cache.stored_nbytes == 2 * PAGE
    assert not rig.downloads.asked
    rig.check()


def test_the_least_recently_used_rows_move_to_the_host_and_are_found_all_the_time() -> None:
    rig = Rig()
    rig.put(1)
    rig.put(2)
    assert rig.find(1)
    rig.put(3)
    assert rig.places(1, 2, 3) == ["d", "d", "d"], "2 is being copied"
    assert len(rig.downloads.asked) == 1
    assert rig.cache.stored_nbytes == 2 * PAGE
    rig.check()
    assert rig.downloads.complete() == 1
    assert rig.places(1, 2, 3) == ["d", "h", "d"]
    found = rig.find(2)
    assert found
    assert bytes(found.data) == bytes([2]) * ROWS
    assert rig.free == 62
    rig.check()


def test_rows_that_are_on_both_sides_leave_the_device_without_a_copy() -> None:
    rig = Rig()
    rig.put(1)
    copies: list[object] = []
    held = rig.find(1)
    assert held
    assert held.device
    for _ in range(2):
        rig.cache.fetch(held.device, copies.append)
    del held
    rig.downloads.complete()
    assert [bytes(each) for each in copies if isinstance(each, memoryview)] == 2 * [bytes([1]) * ROWS]
    assert rig.places(1) == ["dh"]
    rig.check()
    rig.put(2)
    rig.put(3)
    assert rig.places(1, 2, 3) == ["h", "d", "d"]
    assert not rig.downloads.asked
    assert rig.free == 62


def test_a_full_host_drops_rows_there_and_keeps_those_on_the_device() -> None:
    rig = Rig(max_bytes=4 * ENTRY)
    rig.put(1)
    held = rig.find(1)
    assert held
    assert held.device
    rig.cache.fetch(held.device, lambda _: None)
    rig.downloads.complete()
    for content in (2, 3, 4, 5):
        rig.put(content, on_device=False)
    assert rig.places(1, 2, 3, 4, 5) == ["d", "", "h", "h", "h"], "1 is the oldest, and stays on the device"
    assert rig.changes[-1][2] == 1
    rig.check()


def test_many_small_rows_on_the_device_leave_room_for_rows_on_the_host() -> None:
    rig = Rig(max_bytes=12 * ENTRY, pages=20)
    for content in range(1, 19):
        rig.put(content)
    assert rig.places(1, 18) == ["d", "d"]
    for content in range(100, 110):
        rig.put(content, on_device=False)
        rig.check()
    assert rig.places(106, 107, 108, 109) == ["h"] * 4
    assert rig.places(1, 17, 18) == ["", "d", "d"], "the oldest of them left"


def test_rows_that_cannot_be_copied_are_gone() -> None:
    rig = Rig(pages=1)
    rig.put(1)
    rig.put(2)
    rig.downloads.complete(EncodeFailed("lost"))
    assert rig.places(1, 2) == ["", "d"]
    assert rig.free == 63
    rig.check()


def test_what_was_evicted_while_it_was_copied_does_not_come_back() -> None:
    rig = Rig(max_bytes=4 * ENTRY, pages=1)
    rig.put(1)
    rig.put(2)
    for content in (3, 4, 5, 6):
        rig.put(content, on_device=False)
    assert rig.places(1) == [""]
    rig.put(1)
    rig.downloads.complete()
    assert rig.places(1) == ["d"]
    rig.check()


def test_without_room_for_stored_rows_all_move_at_once() -> None:
    rig = Rig(pages=0)
    rig.put(1)
    assert rig.places(1) == ["d"]
    rig.downloads.complete()
    assert rig.places(1) == ["h"]
    assert rig.free == 64


def test_rows_that_are_larger_than_the_cache_are_not_kept() -> None:
    rig = Rig(max_bytes=nbytes_of(ROWS) - 1)
    rig.put(1)
    assert rig.places(1) == [""]
    assert rig.free == 64


def test_rows_that_are_cached_on_the_host_stay_there() -> None:
    rig = Rig()
    rig.put(1, on_device=False)
    rig.put(1)
    assert rig.places(1) == ["h"]
    assert rig.free == 64
    rig.check()


STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "device", "find", "fetch", "complete", "fail"]), st.integers(1, 9)), max_size=60
)


@given(STEPS, st.integers(0, 4), st.integers(1, 8))
def test_bounds_hold_whatever_happens_and_no_room_is_lost(
    steps: list[tuple[str, int]], pages: int, entries: int
) -> None:
    rig = Rig(max_bytes=entries * 2 * ENTRY, pages=pages)
    found: Embedding | None = None
    for what, content in steps:
        found = rig.find(content)
        if found and found.is_on_host:
            assert bytes(found.data) == bytes([content]) * ROWS
        elif found:
            assert found.device
            assert bytes(found.device.download()) == bytes([content]) * ROWS
        if what in ("put", "device"):
            rig.put(content, on_device=what == "device")
        elif what == "fetch" and found and found.device:
            rig.cache.fetch(found.device, lambda _: None)
        elif what in ("complete", "fail"):
            rig.downloads.complete(EncodeFailed("lost") if what == "fail" else None)
        rig.check()
    del found
    rig.downloads.complete()
    rig.check()
    assert rig.free == 64 - rig.cache.stored_nbytes // PAGE
