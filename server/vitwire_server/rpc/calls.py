"""One RPC in flight: the items it holds, and where their outcomes arrive."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING

from vitwire_server.caching.keys import Digest, digest_of
from vitwire_server.core.errors import EncoderError, InvalidRequest, InvalidTensors, Violation
from vitwire_server.core.items import CacheLookup, Item
from vitwire_server.core.models import ModelCard
from vitwire_server.core.reports import Accepted, Encoded, Outcome
from vitwire_server.observe.tracing import REQUEST_ID
from vitwire_server.rpc.codec import Codec
from vitwire_server.rpc.decodes import Decodes, Decoding, Prepared
from vitwire_server.rpc.deliveries import Claims
from vitwire_server.rpc.principals import Caller
from vitwire_server.rpc.unprepared import Unprepared
from vitwire_server.scheduling.tickets import Priority
from vitwire_server.sessions.session import Opening, Session, Sessions

if TYPE_CHECKING:
    from vitwire_server.core.delivery import Consumer, Region

_OTHER_SEED = 1
"""Changes the seed for digests of files, so that no pixels have the digest of a file."""
_LARGE_BYTES = 4 << 20
"""Digests of more than this are computed in a thread."""


@dataclass(frozen=True, slots=True)
class Serving:
    """What RPCs work with once the model is loaded."""

    card: ModelCard
    codec: Codec
    sessions: Sessions
    decoding: Decoding | None = None
    """None if items must be pixels."""
    claims: Claims = field(default_factory=Claims)


@dataclass(slots=True)
class _InFlight:
    """One item, from its arrival until its outcome was sent."""

    key: int
    """Its number in the session: a client may use its own numbers again."""
    submitted: bool = False
    answered: bool = False
    accepted: Accepted | None = None
    """What is sent before the outcome, if the item's rows are only stored or its region follows."""
    is_accepted: bool = False
    """Whether that was sent."""
    region: "asyncio.Future[Region | None] | None" = None
    """Of an item whose region follows; None once it is clear that none comes."""

    @property
    def awaits_region(self) -> bool:
        return not self.answered and self.region is not None and not self.region.done()

    def acceptance(self, item: Item) -> Accepted | None:
        """What precedes the item's outcome."""
        return Accepted(item.grid, item.rows) if item.store_only or self.region else None


class Call:
    """Submits an RPC's items and collects their outcomes. Used on the event loop only.

    Owns the session; `close` gives back what it holds, whatever happened before.
    """

    def __init__(self, serving: Serving, principal: str, caller: Caller, remaining: float | None) -> None:
        """`caller` is charged for uploads that are reserved; `remaining` seconds are left until the deadline."""
        self.priority = Priority.INTERACTIVE
        self.consumer: Consumer | None = None
        """Both are set before the first item is reserved or submitted."""
        self._sessions = serving.sessions
        self._codec = serving.codec
        self._claims = serving.claims
        self._claimed: dict[int, Region] = {}
        self.decodes = Decodes(serving.decoding, serving.codec, self) if serving.decoding else None
        self.principal = principal
        self.caller = caller
        self._deadline = None if remaining is None else time.monotonic() + remaining
        self._keys = count()
        self._items: dict[int, _InFlight] = {}
        self._indices: dict[int, int] = {}
        """Client's numbers by key, of items without an outcome."""
        self._sending: _InFlight | None = None
        """The item whose last message is being sent; its number is free already."""
        self._freed = asyncio.Event()
        self._ended = False
        self._tasks: set[asyncio.Task[None]] = set()
        """Of items that are submitted once their region is known."""
        self._outcomes: asyncio.Queue[tuple[int, Accepted | Outcome] | Exception | None] = asyncio.Queue()

    @property
    def is_idle(self) -> bool:
        """Whether no item is in flight."""
        return not self._items

    def is_open(self, index: int) -> bool:
        """Whether item `index` is in flight."""
        return index in self._items

    def digest(self) -> Digest | None:
        """A new digest for an item's bytes, if the engine needs one."""
        seed = self._sessions.digest_seed
        return None if seed is None else Digest(seed)

    def claim(self, index: int, region: "Region | None") -> None:
        """Claim the region of an item, until its last message is sent. Raises InvalidRequest if it overlaps."""
        if region is None or not region.nbytes or self.consumer is None:
            return
        if not self._claims.take(self.consumer, region):
            reason = "overlaps with the region of another item in flight: lease each item a region of its own"
            raise InvalidRequest([Violation(f"items[{index}].region", reason)])
        self._claimed[index] = region

    @property
    def awaited_regions(self) -> int:
        """How many items wait for their region."""
        return sum(item.awaits_region for item in self._items.values())

    def ask_region(self, index: int) -> None:
        """The region of an item follows its header."""
        (self._items.get(index) or self._add(index)).region = asyncio.get_running_loop().create_future()

    def is_late(self, index: int) -> bool:
        """Whether the region of an item follows, or followed, its header."""
        return self._items[index].region is not None

    def set_region(self, index: int, region: "Region | None") -> bool:
        """A region arrived, which counts if it is awaited; False for an item that was to have none."""
        held = self._items.get(index)
        if held and held.region and not held.region.done():
            held.region.set_result(region)
        return held is None or held.answered or held.region is not None

    def end_regions(self) -> None:
        """No more regions will arrive."""
        for index in self._items:
            self.set_region(index, None)

    async def placed(self, index: int, item: Item, seconds: float) -> Item:
        """The item with its region, if that follows: its rows are announced, and it is awaited for some seconds.

        Raises InvalidRequest for a wrong region.
        """
        held = self._items.get(index)
        if held is None or held.region is None:
            return item
        await self._accept({index: item})
        await asyncio.wait([held.region], timeout=seconds)
        if not held.region.done():
            held.region.set_result(None)
        region = held.region.result()
        if region is None or self.consumer is None:
            return item
        placed = self._codec.placed(f"items[{index}]", item, region, self.consumer)
        self.claim(index, region)
        return placed

    def submit_placed(self, index: int, item: Item, digests: Mapping[int, bytes], seconds: float) -> None:
        """Submit an item with all its bytes once its region is known; errors are those of the item."""

        async def submit() -> None:
            try:
                await self.submit({index: await self.placed(index, item, seconds)}, digests)
            except EncoderError as error:
                self.settle(index, error)
            except Exception as error:  # noqa: BLE001 - the RPC raises and maps it
                self.end(error)

        self.expect(index)
        task = asyncio.create_task(submit())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def reserve(self, index: int, item: Item) -> memoryview:
        """Admit an item whose bytes are still to come; returns the memory to write them into. Raises as Session."""
        held = self._items.get(index) or self._add(index)
        memory = await self._session.reserve(held.key, item)
        await self._accept({index: item})
        return memory

    def expect(self, index: int, *, submitted: bool = True) -> None:
        """An item is in flight that will be reserved once it was decoded; `submitted` if its bytes have arrived."""
        (self._items.get(index) or self._add(index)).submitted = submitted

    async def answer(self, index: int, item: Item, digest: bytes) -> bool:
        """Answer an expected item from the cache; False if it is not cached. Raises as Session."""
        held = self._items[index]
        held.accepted = held.acceptance(item)
        return await self._session.answer(held.key, item, digest)

    async def digest_unprepared(self, item: Unprepared) -> bytes | None:
        """The digest of a file or picture, if the engine needs one."""
        seed = self._sessions.digest_seed
        if seed is None:
            return None
        digest = Digest(seed ^ _OTHER_SEED)
        digest.add(repr(item.picture).encode())
        if len(item.data) > _LARGE_BYTES:
            await asyncio.to_thread(digest.add, item.data)
        else:
            digest.add(item.data)
        return digest.value()

    async def submit(self, items: Mapping[int, Item | CacheLookup], digests: Mapping[int, bytes] | None = None) -> None:
        """Submit items; digests that are needed and not given are computed. Raises as Session."""
        held = {index: self._items.get(index) or self._add(index) for index in items}
        work = {index: item for index, item in items.items() if isinstance(item, Item)}
        seed = self._sessions.digest_seed
        if digests is None and seed is not None:
            digests = await _digests(work, seed)
        for index, in_flight in held.items():
            in_flight.submitted = True
            if index in work and not in_flight.is_accepted:
                in_flight.accepted = in_flight.acceptance(work[index])
        if self.decodes:
            self.decodes.note_pictures(work)
        await self._session.submit(
            {held[index].key: item for index, item in items.items()},
            {held[index].key: digest for index, digest in (digests or {}).items()},
        )
        await self._accept(work)

    async def submit_all(self, items: Sequence[Item | CacheLookup | Unprepared]) -> None:
        """Submit the items of one message, numbered in order; those with files once these were decoded.

        Raises as Session, for all items together.
        """
        files = {index: item for index, item in enumerate(items) if isinstance(item, Unprepared)}
        others = {index: item for index, item in enumerate(items) if not isinstance(item, Unprepared)}
        permits = self.decodes.admit([item.nbytes for item in files.values()]) if self.decodes and files else []
        try:
            if others:
                await self.submit(others)
        except BaseException:
            for permit in permits:
                permit.release()
            raise
        if self.decodes and files:
            # A view would keep the whole message, pixels of other items included.
            own = {index: replace(item, data=bytes(item.data)) for index, item in files.items()}
            self.decodes.start(own, permits)

    def prepared(self, index: int) -> Prepared | None:
        """What was chosen for an encoded item that has an outcome; None for others. Forgets it."""
        return self.decodes.prepared.pop(index, None) if self.decodes else None

    def settle(self, index: int, outcome: Outcome) -> None:
        """The outcome of an item is known."""
        if isinstance(outcome, InvalidTensors):
            outcome = outcome.of_item(index)
        item = self._items.get(index) or self._add(index)
        self._indices.pop(item.key, None)
        if isinstance(outcome, Encoded):
            self._announce(index, item)
        item.answered = True
        self._outcomes.put_nowait((index, outcome))

    def end(self, error: Exception | None = None) -> None:
        """No more items will come; an error ends the RPC."""
        self._outcomes.put_nowait(error)

    async def next(self) -> tuple[int, Accepted | Outcome] | None:
        """The next acceptance or outcome; None once `end` was called and all items are free.

        Raises the error given to `end`.
        """
        while not self._ended or self._items:
            outcome = await self._outcomes.get()
            if isinstance(outcome, Exception):
                raise outcome
            if outcome is not None:
                return outcome
            self._ended = True
        return None

    def free(self, index: int) -> None:
        """The item's last message is about to be sent: the client may use its number again."""
        self._sending = self._items.pop(index)
        self._unclaim(index)
        self._freed.set()

    def sent(self) -> None:
        """The last message of the freed item was sent: its rows are not read any more."""
        item, self._sending = self._sending, None
        if item:
            self._session.release(item.key)

    async def room(self, most: int) -> None:
        """Wait while `most` items or more are in the engine's hands, or wait to be sent.

        A client that sends faster than it reads waits, as its next message is not read. What waits for a region does
        not count: that is one of the messages.
        """
        while sum(self._counts(item) for item in self._items.values()) >= most:
            self._freed.clear()
            await self._freed.wait()

    def close(self) -> int:
        """Close the session; returns how many items have outcomes that were not sent."""
        if self.decodes:
            self.decodes.close()
        for task in self._tasks:
            task.cancel()
        self._session.close()
        self._indices.clear()
        for index in list(self._claimed):
            self._unclaim(index)
        items, self._items = list(self._items.values()), {}
        if self._sending:
            items.append(self._sending)
        while not self._outcomes.empty():
            self._outcomes.get_nowait()
        return sum(item.answered for item in items)

    @cached_property
    def _session(self) -> Session:
        opening = Opening(
            self.principal, self.caller.name, self._deadline, self.priority, REQUEST_ID.get(), self.consumer
        )
        return self._sessions.open(opening, self._completed, fail=self.end)

    async def _accept(self, items: Mapping[int, Item]) -> None:
        """Announce those items whose rows are only stored, or whose region follows."""
        for index, item in items.items():
            held = self._items.get(index)
            if held and not held.is_accepted and (accepted := held.acceptance(item)):
                held.accepted = accepted
                self._announce(index, held, await self._session.forecast(item.footprint.tokens))

    def _announce(self, index: int, item: _InFlight, forecast: float = 0.0) -> None:
        if item.accepted and not item.is_accepted and not item.answered:
            item.is_accepted = True
            self._outcomes.put_nowait((index, replace(item.accepted, forecast=forecast)))

    @staticmethod
    def _counts(item: _InFlight) -> bool:
        return item.answered or (item.submitted and not item.awaits_region)

    def _add(self, index: int) -> _InFlight:
        item = self._items[index] = _InFlight(next(self._keys))
        self._indices[item.key] = index
        return item

    def _unclaim(self, index: int) -> None:
        if region := self._claimed.pop(index, None):
            assert self.consumer, "regions were claimed for it"
            self._claims.give_back(self.consumer, region)

    def _completed(self, key: int, outcome: Outcome) -> None:
        """Called by the session."""
        index = self._indices.get(key)
        if index is not None:
            self.settle(index, outcome)


async def _digests(items: Mapping[int, Item], seed: int) -> dict[int, bytes]:
    """The digest of each item's bytes."""

    def digests() -> dict[int, bytes]:
        return {index: digest_of(item, seed) for index, item in items.items()}

    if sum(item.nbytes for item in items.values()) <= _LARGE_BYTES:
        return digests()
    return await asyncio.to_thread(digests)
