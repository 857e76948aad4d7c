"""The asyncio client. `client.py` is the same for threads."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

from vitwire._arguments import (
    BatchOptions,
    CallOptions,
    ClipOptions,
    ImageOptions,
    IterOptions,
    batch_items,
    clip_items,
    image_items,
)
from vitwire._delivery.answers import Result, Stored, Storing, in_order, needs_upload, storable
from vitwire._inputs.sources import Clip, ImageLike
from vitwire._requests import BaseClient, Call
from vitwire._transport.ahead import AsyncAhead, Items
from vitwire._transport.aio_calls import AsyncTransport
from vitwire._transport.attempts import HEALTH_SECONDS
from vitwire.embeddings import Embedding
from vitwire.errors import VitwireError
from vitwire.items import Item, numbered, pixel_bytes, without_pixels
from vitwire.model import Model

_LARGE_BYTES = 1 << 20
"""Bytes of pixels that may be rounded on the event loop."""


class AsyncClient(BaseClient[AsyncTransport]):
    """A connection to an encoder service, bound to the event loop that first uses it. Share one, close it when done.

    The arguments are those of `Client`. Cancelling a call cancels its RPCs on the server.
    """

    _make_transport = AsyncTransport

    # -- calls -------------------------------------------------------------------------------------

    async def encode(self, items: Sequence[Item], **options: Unpack[CallOptions]) -> list[Embedding]:
        """Encode items; returns their embeddings in the same order. As `Client.encode`."""
        return await self._encode(items, self._call(options))

    @overload
    def iter_encode(
        self, items: Items, *, return_exceptions: Literal[False] = False, **options: Unpack[IterOptions]
    ) -> AsyncGenerator[tuple[int, Embedding], None]: ...

    @overload
    def iter_encode(
        self, items: Items, *, return_exceptions: Literal[True], **options: Unpack[IterOptions]
    ) -> AsyncGenerator[Result, None]: ...

    async def iter_encode(
        self, items: Items, *, return_exceptions: bool = False, **options: Unpack[IterOptions]
    ) -> AsyncGenerator[Result, None]:
        """Yield `(position, embedding)` of each item as soon as it is ready. As `Client.iter_encode`.

        items: also an asynchronous iterable; an iterable that is neither that nor a sequence is read in threads.

        Leaving the loop cancels the rest: at once within `contextlib.aclosing`, else when the generator is collected.
        """
        errors: list[VitwireError] = []
        call = self._call(options, IterOptions, stream=return_exceptions)
        if isinstance(items, Sequence):
            stream = self._answers(numbered(items), call)
        else:
            stream = AsyncAhead(items, lambda group: self._answers(group, call.for_request())).results()
        async with aclosing(stream) as results:
            async for index, result in results:
                if isinstance(result, VitwireError) and not return_exceptions:
                    errors.append(result)
                else:
                    yield index, result
        if errors:
            raise min(errors, key=lambda error: error.item or 0)

    async def encode_cached(self, items: Sequence[Item], **options: Unpack[CallOptions]) -> list[Embedding]:
        """Sends the content of items with a `content_id` only if needed. As `Client.encode_cached`."""
        return await self._encode(items, self._call(options, looks_up=True))

    async def store(self, items: Sequence[Item], **options: Unpack[CallOptions]) -> list[Stored]:
        """Encode items into the server's cache, without returning rows. As `Client.store`."""
        return in_order(await self._collected(storable(items), self._call(options, store_only=True)))

    async def iter_store(self, items: Sequence[Item], **options: Unpack[CallOptions]) -> AsyncGenerator[Storing, None]:
        """Yield `(position, Accepted)` and then `(position, Stored)` of each item. As `Client.iter_store`."""
        call = self._call(options, store_only=True)
        async with aclosing(self._answers(storable(items), call)) as answers:
            async for index, answer in answers:
                yield index, answer

    async def encode_batch(
        self, pixel_values: object, grid_thw: object = None, **options: Unpack[BatchOptions]
    ) -> list[Embedding]:
        """Encode what a Hugging Face processor returned, split in a thread. As `Client.encode_batch`."""
        call = self._call(options, BatchOptions)
        model = await self._get_model(call)
        return await self._encode(await asyncio.to_thread(batch_items, pixel_values, grid_thw, model, **options), call)

    async def encode_images(self, images: Sequence[ImageLike], **options: Unpack[ImageOptions]) -> list[Embedding]:
        """Encode images, prepared in threads for the server's model. As `Client.encode_images`."""
        call = self._call(options, ImageOptions)
        model = await self._get_model(call)
        return await self._encode(await asyncio.to_thread(image_items, images, model, options), call)

    async def encode_clips(self, clips: Sequence[Clip], **options: Unpack[ClipOptions]) -> list[Embedding]:
        """Encode clips, prepared in threads for the server's model. As `Client.encode_clips`."""
        call = self._call(options, ClipOptions)
        model = await self._get_model(call)
        return await self._encode(await asyncio.to_thread(clip_items, clips, model, options), call)

    async def model(self, timeout: float | None = None, *, refresh: bool = False) -> Model:  # noqa: ASYNC109  # of RPCs
        """The server's model and limits, cached. As `Client.model`."""
        return await self._get_model(self._call({"timeout": timeout}), refresh=refresh)

    async def health(self, service: str = "", timeout: float | None = None) -> str:  # noqa: ASYNC109  # of RPCs
        """SERVING, NOT_SERVING, SERVICE_UNKNOWN or UNKNOWN. As `Client.health`."""
        context = self._context()
        with context.naming_errors():
            return await self._shared.transport.health(service, self._deadline(timeout, HEALTH_SECONDS), context)

    async def close(self) -> None:
        """Close the connections and cancel requests in flight. Has no effect on a client made by `with_options`."""
        if self._end():
            await self._shared.transport.close()
            await asyncio.to_thread(self._shared.nixl.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _encode(self, items: Sequence[Item], call: Call) -> list[Embedding]:
        unanswered = numbered(items)
        results: dict[int, Embedding | VitwireError] = {}
        if call.looks_up and unanswered:
            model = await self._get_model(call)
            call = replace(call, shares=self._shares(unanswered, model))  # pixels go where rows were looked up
            results = await self._collected({index: without_pixels(item) for index, item in unanswered.items()}, call)
            unanswered = {index: item for index, item in unanswered.items() if needs_upload(results[index], item)}
        return in_order(results | await self._collected(unanswered, call))

    async def _collected(self, items: Mapping[int, Item], call: Call) -> dict[int, Any]:
        async with aclosing(self._answers(items, call)) as results:
            return {index: result async for index, result in results}

    async def _answers(self, items: Mapping[int, Item], call: Call) -> AsyncGenerator[Any, None]:
        """Position and `Answer` of each item: of those that the call asks for. Raises errors of the whole request."""
        if not items:
            return
        model, transport, context = await self._get_model(call), self._shared.transport, self._context()
        with self._observed(context, len(items)):
            # Rounding float32 takes milliseconds, in which other requests of the loop would wait.
            rounds = model.dtype != "float32" and sum(map(pixel_bytes, items.values())) > _LARGE_BYTES
            parts = (
                await asyncio.to_thread(self._parts, items, call, model) if rounds else self._parts(items, call, model)
            )
            async with transport.slots.hold(call.deadline.left_to_wait()):
                deadline = self._covering(items, call)
                async with aclosing(transport.encode(parts, deadline, context)) as stream:
                    async for result in stream:
                        yield self._noted(result, context)

    async def _get_model(self, call: Call, *, refresh: bool = False) -> Model:
        model = None if refresh else self._shared.model
        if model is None:
            context = self._context()
            with context.naming_errors():
                self._shared.model = model = await self._shared.transport.model(call.deadline, context)
        return model
