"""The cache keeps its bound, and separates principals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitwire_server.caching.cache import Content, EmbeddingCache, Key, Name
from vitwire_server.core.grids import Grid
from vitwire_server.core.items import DType, Embedding, Modality

GRID = Grid(1, 2, 2)


def key(digest: bytes = b"x", principal: str = "", output: DType = DType.FLOAT32, keep_ratio: float = 0.0) -> Key:
    content = Content(Modality.IMAGE, GRID, ((DType.UINT8, (4, 12)),), digest)
    return Key(principal, "weights", output, keep_ratio, content)


def name(content_id: str, principal: str = "") -> Name:
    return Name(principal, "weights", DType.FLOAT32, 0.0, content_id)


def rows(nbytes: int = 1000, kept: tuple[int, ...] = ()) -> Embedding:
    return Embedding(memoryview(bytes(nbytes)), DType.FLOAT32, (nbytes // 4, 1), kept)


def test_least_recently_used_embeddings_leave_first() -> None:
    changes: list[tuple[int, int, int]] = []
    cache = EmbeddingCache(3 * 2024, lambda *held: changes.append(held))
    for digest in (b"a", b"b", b"c"):
        cache.put(key(digest), rows(), set())
    assert cache.get(key(b"a")) is not None
    cache.put(key(b"d"), rows(), set())
    assert [cache.get(key(digest)) is not None for digest in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
    assert changes[-1] == (cache.nbytes, 0, 1)
    cache.put(key(b"e"), rows(3 * 2024), set())
    assert cache.get(key(b"e")) is None, "what is larger than the cache does not empty it"
    assert len(cache._entries) == 3


@pytest.mark.parametrize(
    "other",
    [
        key(principal="mallory"),
        key(output=DType.FLOAT16),
        key(keep_ratio=0.5),
        key(digest=b"y"),
        key()._replace(fingerprint="other weights"),
        key()._replace(content=key().content._replace(grid=Grid(1, 4, 1))),
        key()._replace(content=key().content._replace(modality=Modality.VIDEO)),
        key()._replace(content=key().content._replace(forms=((DType.FLOAT32, (4, 3)),))),
    ],
)
def test_everything_that_decides_over_the_rows_is_in_the_key(other: Key) -> None:
    cache = EmbeddingCache(1 << 20)
    cache.put(key(), rows(), {name("cat")})
    assert cache.get(key()) is not None
    assert cache.get(other) is None
    assert cache.find(name("cat", principal="mallory")) is None


def test_a_name_stands_for_what_it_was_last_given_with() -> None:
    cache = EmbeddingCache(1 << 20)
    cache.put(key(b"old"), rows(kept=(1,)), {name("cat")})
    cache.put(key(b"new"), rows(kept=(2,)), {name("cat"), name("pet")})
    found = cache.find(name("cat"))
    assert found
    assert found[1].kept == (2,)
    assert cache.get(key(b"old"), name("cat")) is not None, "the old content came again under the name"
    found = cache.find(name("cat"))
    assert found
    assert found[1].kept == (1,)
    found = cache.find(name("pet"))
    assert found
    assert found[1].kept == (2,)


def test_rows_that_come_again_keep_their_names() -> None:
    cache = EmbeddingCache(1 << 20)
    for called in ("cat", "pet"):
        cache.put(key(), rows(), {name(called)})
    assert cache.find(name("cat")) is not None
    assert cache.find(name("pet")) is not None


def test_rows_are_copied_out_of_the_buffer_they_came_in() -> None:
    cache, buffer = EmbeddingCache(1 << 20), bytearray(b"\1\0\0\0")
    cache.put(key(), Embedding(memoryview(buffer), DType.FLOAT32, (1, 1)), set())
    buffer[0] = 9
    held = cache.get(key())
    assert held
    assert bytes(held.data) == b"\1\0\0\0"


STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "get", "find"]), st.integers(0, 5), st.integers(0, 5), st.integers(0, 4000)),
    max_size=60,
)


@given(STEPS)
def test_the_bound_holds_whatever_happens_and_names_leave_with_their_embedding(
    steps: list[tuple[str, int, int, int]],
) -> None:
    cache = EmbeddingCache(12_000)
    last: dict[int, int] = {}
    for what, content, called, nbytes in steps:
        this = key(bytes([content]))
        if what == "put":
            cache.put(this, rows(nbytes // 4 * 4), {name(str(called))})
            last[called] = content
        elif what == "get" and cache.get(this, name(str(called))):
            last[called] = content
        elif what == "find" and (found := cache.find(name(str(called)))):
            assert found[0] == key(bytes([last[called]]))
        assert cache.nbytes <= 12_000
        assert cache.nbytes == sum(entry.nbytes for entry in cache._entries.values())
        assert {each.key for each in cache._named.values()} <= cache._entries.keys()
        assert {one for entry in cache._entries.values() for one in entry.names} == cache._named.keys()


def test_a_name_does_not_go_back_to_older_pixels() -> None:
    """The newer ones could not be kept, so the name stands for nothing."""
    cache = EmbeddingCache(4048)
    cache.put(key(b"old"), rows(), {name("cat"), name("dog")})
    cache.put(key(b"new"), rows(4048), {name("cat"), name("bird")})
    assert cache.find(name("cat")) is None
    assert cache.find(name("dog")) is not None
    assert cache.get(key(b"old")) is not None
