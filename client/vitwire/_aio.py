"""The asyncio client. `_client.py` is the same for threads."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self, overload

from vitwire._aio_ahead import AsyncAhead, Items
from vitwire._aio_transport import AsyncTransport
from vitwire._balancing import Balancing, Share, Spread
from vitwire._channel import Tls, bearer, credentials
from vitwire._connections import CONNECTIONS
from vitwire._deadline import HEALTH_SECONDS, MODEL_SECONDS, Deadline
from vitwire._embedding import DType, Embedding
from vitwire._errors import VitwireError
from vitwire._exchange import may_mean_other_model
from vitwire._items import Item, without_pixels
from vitwire._model import Model
from vitwire._nixl import POOL_BYTES, Delivery, Nixl
from vitwire._prepare import clip_items, image_items
from vitwire._protocol import Options, Priority, Result, embeddings, needs_upload, parts_of
from vitwire._retry import MAX_RETRIES, Policy
from vitwire._target import checked_target

if TYPE_CHECKING:
    from vitwire._prepare import Clip, ImageLike


class AsyncClient:
    """A connection to an encoder service, bound to the event loop that first uses it. Share one, close it when done.

    The arguments are those of `Client`. Cancelling a call cancels its RPCs on the server.
    """

    def __init__(
        self,
        target: str,
        *,
        tls: Tls = None,
        token: str | None = None,
        timeout: float | None = None,
        spread: Spread = 1,
        affinity: bool = False,
        connections: int = CONNECTIONS,
        max_retries: int = MAX_RETRIES,
        wait_for_ready: bool = False,
        delivery: Delivery = "auto",
        device: str | None = None,
        delivery_bytes: int = POOL_BYTES,
    ) -> None:
        self._balancing = Balancing(spread, affinity)
        self._policy = Policy(max_retries, wait_for_ready)
        self._timeout = timeout
        self._model: Model | None = None
        self._nixl = Nixl(delivery, device, delivery_bytes)
        self._transport = AsyncTransport(
            checked_target(target), credentials(tls), bearer(token), self._policy, connections, affinity=affinity
        )

    # -- calls -------------------------------------------------------------------------------------

    async def encode(
        self,
        items: Sequence[Item],
        timeout: float | None = None,  # noqa: ASYNC109  # also the deadline of the RPCs
        output_type: DType | None = None,
        priority: Priority = "interactive",
    ) -> list[Embedding]:
        """Encode items; returns their embeddings in the same order. As `Client.encode`."""
        return await self._encode(items, self._deadline(timeout), Options.of(output_type, priority))

    @overload
    def iter_encode(
        self,
        items: Items,
        timeout: float | None = None,
        output_type: DType | None = None,
        priority: Priority = "interactive",
        *,
        return_exceptions: Literal[False] = False,
    ) -> AsyncGenerator[tuple[int, Embedding], None]: ...

    @overload
    def iter_encode(
        self,
        items: Items,
        timeout: float | None = None,
        output_type: DType | None = None,
        priority: Priority = "interactive",
        *,
        return_exceptions: Literal[True],
    ) -> AsyncGenerator[Result, None]: ...

    async def iter_encode(
        self,
        items: Items,
        timeout: float | None = None,  # noqa: ASYNC109  # also the deadline of the RPCs
        output_type: DType | None = None,
        priority: Priority = "interactive",
        *,
        return_exceptions: bool = False,
    ) -> AsyncGenerator[Result, None]:
        """Yield `(position, embedding)` of each item as soon as it is ready. As `Client.iter_encode`.

        items: also an asynchronous iterable; an iterable that is neither that nor a sequence is read in threads.

        Leaving the loop cancels the rest: at once within `contextlib.aclosing`, else when the generator is collected.
        """
        deadline = self._deadline(timeout)
        errors: list[VitwireError] = []
        options = Options.of(output_type, priority, stream=return_exceptions)
        async with aclosing(self._results_of(items, deadline, options)) as results:
            async for index, result in results:
                if isinstance(result, VitwireError) and not return_exceptions:
                    errors.append(result)
                else:
                    yield index, result
        if errors:
            raise min(errors, key=lambda error: error.item or 0)

    async def encode_cached(
        self,
        items: Sequence[Item],
        timeout: float | None = None,  # noqa: ASYNC109  # also the deadline of the RPCs
        output_type: DType | None = None,
        priority: Priority = "interactive",
    ) -> list[Embedding]:
        """Sends pixels of items with a `content_id` only if needed. As `Client.encode_cached`."""
        deadline, options = self._deadline(timeout), Options.of(output_type, priority)
        if not items:
            return []
        shares = self._shares(dict(enumerate(items)), await self._get_model(deadline))  # also those of the uploads
        lookups = {index: without_pixels(item) for index, item in enumerate(items)}
        async with aclosing(self._results(lookups, deadline, options, shares)) as found:
            results = {index: result async for index, result in found}
        uploads = {index: item for index, item in enumerate(items) if needs_upload(results[index], item)}
        async with aclosing(self._results(uploads, deadline, options, shares)) as uploaded:
            return embeddings(results | {index: result async for index, result in uploaded})

    async def encode_images(
        self,
        images: "Sequence[ImageLike]",
        timeout: float | None = None,  # noqa: ASYNC109  # also the deadline of the RPCs
        output_type: DType | None = None,
        priority: Priority = "interactive",
    ) -> list[Embedding]:
        """Encode images, prepared in threads for the server's model. As `Client.encode_images`."""
        deadline, options = self._deadline(timeout), Options.of(output_type, priority)
        items = await asyncio.to_thread(image_items, images, await self._get_model(deadline))
        return await self._encode(items, deadline, options)

    async def encode_clips(
        self,
        clips: "Sequence[Clip]",
        timeout: float | None = None,  # noqa: ASYNC109  # also the deadline of the RPCs
        output_type: DType | None = None,
        priority: Priority = "interactive",
    ) -> list[Embedding]:
        """Encode clips, prepared in threads for the server's model. As `Client.encode_clips`."""
        deadline, options = self._deadline(timeout), Options.of(output_type, priority)
        items = await asyncio.to_thread(clip_items, clips, await self._get_model(deadline))
        return await self._encode(items, deadline, options)

    async def model(self, timeout: float | None = None) -> Model:  # noqa: ASYNC109  # as above
        """The server's model and limits, cached. As `Client.model`."""
        return await self._get_model(self._deadline(timeout))

    async def health(self, service: str = "", timeout: float | None = None) -> str:  # noqa: ASYNC109  # as above
        """SERVING, NOT_SERVING, SERVICE_UNKNOWN or UNKNOWN. As `Client.health`."""
        return await self._transport.health(service, self._deadline(timeout, HEALTH_SECONDS))

    async def close(self) -> None:
        """Close the connection and cancel requests in flight."""
        await self._transport.close()
        await asyncio.to_thread(self._nixl.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _encode(self, items: Sequence[Item], deadline: Deadline, options: Options) -> list[Embedding]:
        async with aclosing(self._results(dict(enumerate(items)), deadline, options)) as results:
            return embeddings({index: result async for index, result in results})

    def _results_of(self, items: Items, deadline: Deadline, options: Options) -> AsyncGenerator[Result, None]:
        """As `_results`; an iterable that is not a sequence is read ahead."""
        if isinstance(items, Sequence):
            return self._results(dict(enumerate(items)), deadline, options)
        return AsyncAhead(items, lambda group: self._results(group, deadline.for_request(), options)).results()

    async def _results(
        self,
        items: Mapping[int, Item],
        deadline: Deadline,
        options: Options,
        shares: Sequence[Share] | None = None,
    ) -> AsyncGenerator[Result, None]:
        """Embedding or error of each item, by position. Raises errors of the whole request."""
        if not items:
            return
        model = await self._get_model(deadline)
        options = replace(options, leasing=self._nixl.leasing(model, options.output_type))
        parts = parts_of(items, shares or self._shares(items, model), options, model)
        deadline = deadline.covering(items.values(), patient=options.patient or self._policy.wait_for_ready)
        try:
            async with aclosing(self._transport.encode(parts, model.deepstack_levels, deadline)) as stream:
                async for index, result in stream:
                    if isinstance(result, VitwireError):
                        self._forget_model_after(result)
                    yield index, result
        except VitwireError as error:
            self._forget_model_after(error)
            raise

    async def _get_model(self, deadline: Deadline) -> Model:
        if self._model is None:
            self._model = await self._transport.model(deadline)
        return self._model

    def _shares(self, items: Mapping[int, Item], model: Model) -> list[Share]:
        return self._balancing.shares(items, model, self._transport.replicas.count())

    def _forget_model_after(self, error: VitwireError) -> None:
        """Forget the model if the error may mean that the server has another one now."""
        if may_mean_other_model(error):
            self._model = None

    def _deadline(self, timeout: float | None, default: float = MODEL_SECONDS) -> Deadline:
        return Deadline(self._timeout if timeout is None else timeout, default)
