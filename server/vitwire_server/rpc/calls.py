"""One RPC in flight: it submits items to a session, which answers them."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from vitwire_server.caching.keys import Buffer, digests_of, parts_of
from vitwire_server.core.delivery import Consumer, Region
from vitwire_server.core.errors import EncoderError, InvalidRequest, Violation
from vitwire_server.core.items import CacheLookup, Item
from vitwire_server.core.models import ModelCard
from vitwire_server.observe.tracing import REQUEST_ID
from vitwire_server.rpc.codec import Codec
from vitwire_server.rpc.credentials import Caller
from vitwire_server.rpc.file_items import Decoding, Prepared
from vitwire_server.rpc.items_in_flight import Claims, ItemsInFlight, Pending
from vitwire_server.scheduling.tickets import Priority
from vitwire_server.sessions.session import Opening, Session, Sessions


@dataclass(frozen=True, slots=True)
class Serving:
    """Shared by all RPCs once the model is loaded."""

    card: ModelCard
    codec: Codec
    sessions: Sessions
    decoding: Decoding | None = None
    """None if items must be pixels."""
    claims: Claims = field(default_factory=Claims)


class Call:
    """Submits an RPC's items. Used on the event loop only.

    Owns the session; `close` gives back what it holds, whatever happened before.
    """

    def __init__(self, serving: Serving, principal: str, caller: Caller, remaining: float | None) -> None:
        """`caller` is charged for uploads that are reserved; `remaining` seconds are left until the deadline."""
        self.serving = serving
        self.principal = principal
        self.caller = caller
        self.priority = Priority.INTERACTIVE
        self.consumer: Consumer | None = None
        """Both are set before the first item is reserved or submitted."""
        self.answers = ItemsInFlight()
        self._deadline = None if remaining is None else time.monotonic() + remaining
        self._sending: Pending | None = None
        """The item whose last message is being sent; its number is free already."""
        self._tasks: set[asyncio.Task[None]] = set()

    def claim(self, index: int, region: Region | None) -> None:
        """Claim the region of an item, until its last message is sent. Raises InvalidRequest if it overlaps."""
        if region is None or not region.nbytes or self.consumer is None:
            return
        unclaim = self.serving.claims.take(self.consumer, region)
        if unclaim is None:
            reason = "overlaps with the region of another item in flight: lease a separate region to each item"
            raise InvalidRequest([Violation(f"items[{index}].region", reason)])
        self.answers.item(index).unclaim = unclaim

    async def placed(self, index: int, item: Item, seconds: float) -> Item:
        """The item with its region, if that follows: its rows are announced, and it is awaited for some seconds.

        Raises InvalidRequest for a wrong region.
        """
        pending = self.answers.item(index)
        if pending.region is None:
            return item
        await self._accept({index: item})
        await asyncio.wait([pending.region], timeout=seconds)
        pending.place(None)
        region = pending.region.result()
        if region is None or self.consumer is None:
            return item
        placed = self.serving.codec.placed(f"items[{index}]", item, region, self.consumer)
        self.claim(index, region)
        return placed

    def start(self, index: int, submit: Callable[[], Awaitable[None]]) -> None:
        """Submit an item whose bytes have arrived in a task. An EncoderError fails the item, any other the RPC."""

        async def run() -> None:
            try:
                await submit()
            except EncoderError as error:
                self.answers.settle(index, error)

        self.run(run())

    def run(self, work: Coroutine[object, object, None]) -> None:
        """Run in a task, which ends with the call; its error is the RPC's."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self.answers.end(error)

    async def reserve(self, index: int, item: Item) -> memoryview:
        """Admit an item whose bytes are still to come; returns the memory to write them into. Raises as Session."""
        memory = await self._session.reserve(self.answers.item(index).key, item)
        await self._accept({index: item})
        return memory

    async def answer(self, index: int, item: Item, digest: bytes) -> bool:
        """Answer an item in flight from the cache; False if it is not cached. Raises as Session."""
        pending = self.answers.item(index)
        pending.accept(item)
        return await self._session.answer(pending.key, item, digest)

    async def digests(self, contents: Mapping[int, Sequence[Buffer]], changed: int = 0) -> dict[int, bytes]:
        """Digests of contents, if the engine needs them. `changed` changes the seed."""
        seed = self.serving.sessions.digest_seed
        return {} if seed is None else await digests_of(contents, seed ^ changed)

    async def submit(self, items: Mapping[int, Item | CacheLookup], digests: Mapping[int, bytes] | None = None) -> None:
        """Submit items; digests that are needed and not given are computed. Raises as Session."""
        pending = {index: self.answers.item(index) for index in items}
        work = {index: item for index, item in items.items() if isinstance(item, Item)}
        if digests is None:
            digests = await self.digests({index: parts_of(item) for index, item in work.items()})
        for index, item in work.items():
            pending[index].accept(item)
            if item.is_picture and self.serving.decoding:  # the engine prepares it
                pending[index].prepared = pending[index].prepared or Prepared(item.grid)
                self.serving.decoding.metrics.prepared(None)
        await self._session.submit(
            {pending[index].key: item for index, item in items.items()},
            {pending[index].key: digest for index, digest in digests.items()},
        )
        await self._accept(work)

    def free(self, index: int) -> None:
        """The item's last message is about to be sent: the client may use its number again."""
        self._sending = self.answers.free(index)
        self._sending.give_back()

    def sent(self) -> None:
        """The last message of the freed item was sent: its rows are not read any more.

        After the last item the session is about to close, which releases it as well.
        """
        item, self._sending = self._sending, None
        if item and not self.answers.are_over:
            self._session.release(item.key)

    def close(self) -> int:
        """Close the session; returns how many items have outcomes that were not sent."""
        for task in self._tasks:
            task.cancel()
        self._session.close()
        return self.answers.close() + (self._sending is not None)

    @cached_property
    def _session(self) -> Session:
        opening = Opening(
            self.principal, self.caller.name, self._deadline, self.priority, REQUEST_ID.get(), self.consumer
        )
        return self.serving.sessions.open(opening, self.answers.completed, fail=self.answers.end)

    async def _accept(self, items: Mapping[int, Item]) -> None:
        """Announce those items whose rows are only stored, or whose region follows."""
        for index, item in items.items():
            pending = self.answers.items.get(index)
            if pending and not pending.is_accepted:
                pending.accept(item)
                if pending.accepted:
                    self.answers.announce(index, pending, await self._session.forecast(item.footprint.tokens))
