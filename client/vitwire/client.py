"""The synchronous client. `aio.py` is the same for asyncio."""

from collections.abc import Generator, Iterable, Mapping, Sequence
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
from vitwire._transport.ahead import Ahead
from vitwire._transport.attempts import HEALTH_SECONDS
from vitwire._transport.calls import Calls, Transport
from vitwire.embeddings import Embedding
from vitwire.errors import VitwireError
from vitwire.items import Item, numbered, without_pixels
from vitwire.model import Model


class Client(BaseClient[Transport]):
    """A connection to an encoder service. Thread-safe: share one, and close it when done.

    target: `host:port`, `dns:///name:port` (balanced over all addresses of the name) or `unix:path`; without a port,
        50051. By default, the environment variable VITWIRE_TARGET.
    tls: True for TLS with the system's root certificates, a PEM file of root certificates, or gRPC channel credentials
        (from `grpc.ssl_channel_credentials`, for a client certificate); no TLS by default.
    token: bearer token, sent with every request, or a function that returns it, called for each request.
    timeout: default seconds per call. None depends on the work: 60 s plus 25 ms per patch, with 10 minutes instead of
        60 s for priority "batch" or `wait_for_ready`. float("inf") waits without limit.
    output_type: default type of embeddings: float32, float16 or bfloat16. None is the server's dtype.
    priority: default priority of requests: "interactive", or "batch" for requests that may wait behind others.
    spread: maximum RPCs that a request is split into, by tokens, to share it between replicas. "auto": one for each
        budget's worth of tokens, at most one per replica that answered within the last minute.
    affinity: send items with equal content ids to the same replica, whose cache may have them: each content id of a
        request becomes a separate RPC, sent to one of the target's addresses by the hash of the content id.
    connections: maximum connections for requests of one message, and for streams; opened when requests overlap.
    max_in_flight: maximum requests in flight; further ones wait in the client, within an explicit timeout.
    max_retries: maximum retries of an RPC, within the timeout, if no server is ready, a server stops or does not
        answer, or a full server says when to retry; the count restarts whenever an item is answered.
    wait_for_ready: wait, within the timeout, for a server that is starting or loading its model.
    metadata: sent with every request, in addition to the client's headers; keys are not case-sensitive.
    channel_options: gRPC channel arguments that add to or replace the client's.
    delivery: "stream": embeddings come in responses. "nixl": the server writes them into memory of this process
        through NIXL; a call fails if that is not possible. "auto": NIXL to a `device` if possible, else a stream.
    device: CUDA device, such as "cuda:0", that NIXL delivers to; None for host memory.
    delivery_bytes: memory for embeddings that NIXL delivers. Embeddings hold it until they are garbage-collected.

    Raises ValueError for an invalid argument. docs/client.md has the details. Pickling keeps the arguments.
    """

    _make_transport = Transport

    # -- calls -------------------------------------------------------------------------------------

    def encode(self, items: Sequence[Item], **options: Unpack[CallOptions]) -> list[Embedding]:
        """Encode items; returns their embeddings in the same order.

        timeout: seconds for the whole call, including preparation; default: the client's.
        output_type: type of the embeddings; default: the client's, else the server's dtype.
        priority: "interactive" or "batch"; default: the client's.
        Raises the error of the first item that failed, with its position as `.item`, or the error of the request.
        """
        return self._encode(items, self._call(options))

    @overload
    def iter_encode(
        self, items: Iterable[Item], *, return_exceptions: Literal[False] = False, **options: Unpack[IterOptions]
    ) -> Generator[tuple[int, Embedding], None, None]: ...

    @overload
    def iter_encode(
        self, items: Iterable[Item], *, return_exceptions: Literal[True], **options: Unpack[IterOptions]
    ) -> Generator[Result, None, None]: ...

    def iter_encode(
        self, items: Iterable[Item], *, return_exceptions: bool = False, **options: Unpack[IterOptions]
    ) -> Generator[Result, None, None]:
        """Yield `(position, embedding)` of each item once it is ready; leaving the loop cancels the rest.

        A thread reads the items of a generator or another iterable that is not a sequence, at most 64 items or 128 MiB
        ahead of the results, and sends them as it reads. An explicit timeout covers them all; the default one applies
        to each RPC.

        An item that fails does not stop the others: after all have been yielded, the error of the first failed item is
        raised. Errors of the whole request are raised at once. Without `return_exceptions`, a request of up to 4 MiB is
        a single message, which the server rejects as a whole if one item is invalid (InvalidItem names it). The other
        arguments are those of `encode`.

        return_exceptions: yield the error of an item instead of its embedding. The request is then always a stream, so
            an invalid item does not fail the others.
        groups: before an embedding, also yield its rows as they arrive, in order, as `RowGroup`; where
            `Model.clip_groups` is true, rows of a clip are sent while others are computed. Retries repeat none.
        """
        errors: list[VitwireError] = []
        call = self._call(options, IterOptions, stream=return_exceptions)
        if isinstance(items, Sequence):
            results = self._answers(numbered(items), call)
        else:
            results = Ahead(items, lambda group, calls: self._answers(group, call.for_request(), calls)).results()
        for index, result in results:
            if isinstance(result, VitwireError) and not return_exceptions:
                errors.append(result)
            else:
                yield index, result
        if errors:
            raise min(errors, key=lambda error: error.item or 0)

    def encode_cached(self, items: Sequence[Item], **options: Unpack[CallOptions]) -> list[Embedding]:
        """As `encode`, but sends the content of items with a `content_id` only if the server has not cached them."""
        return self._encode(items, self._call(options, looks_up=True))

    def store(self, items: Sequence[Item], **options: Unpack[CallOptions]) -> list[Stored]:
        """Encode items into the server's cache without returning embeddings; arguments as for `encode`.

        Each item needs a `content_id`: a client that sends this `content_id` without pixels, with the same
        token and `output_type`, gets the embedding. An item without pixels only checks the cache. Raises the
        error of the first item that failed: NotCached for one without pixels, InvalidItem if the server has no cache.
        """
        return in_order(dict(self._answers(storable(items), self._call(options, store_only=True))))

    def iter_store(self, items: Sequence[Item], **options: Unpack[CallOptions]) -> Generator[Storing, None, None]:
        """As `store`, step by step: yields `(position, Accepted)`, then `(position, Stored)` or an error, of each item.

        An item is accepted before it is encoded, and even before its bytes have arrived. From then on requests for its
        `content_id` wait for it. A retry may yield `Accepted` again.
        """
        yield from self._answers(storable(items), self._call(options, store_only=True))

    def encode_batch(
        self, pixel_values: object, grid_thw: object = None, **options: Unpack[BatchOptions]
    ) -> list[Embedding]:
        """Encode a Hugging Face processor's output; returns the embeddings of its images or clips, in order.

        pixel_values: `pixel_values`, or `pixel_values_videos` with modality="video" (default: "image"): a numpy array,
            a torch tensor of any floating type on any device, or a list of them. Or all outputs of the processor, as a
            BatchFeature or dict: see `Item.from_processor`.
        grid_thw: the processor's `image_grid_thw` or `video_grid_thw`, `(items, 3)`; for tile towers the number of
            tiles of each image. Not needed if pixel_values are all outputs, or if each image is one tile.
        content_ids: keys of the contents in the server's cache; pixels are then sent only if they are not cached.
        keep_ratio: share of the tokens of clips to keep; see `Item`. Default: 0, all of them.
        crops: all crops, of towers that take them; grid_thw is then the number of crops of each image.

        Raises InvalidItem, naming the field (`grid_thw[3]`), if the tensors disagree. The other arguments and errors
        are those of `encode`.
        """
        call = self._call(options, BatchOptions)
        return self._encode(batch_items(pixel_values, grid_thw, self._get_model(call), **options), call)

    def encode_images(self, images: Sequence[ImageLike], **options: Unpack[ImageOptions]) -> list[Embedding]:
        """Encode images, which the server prepares for its model; arguments and errors as for `encode`.

        images: paths, bytes of files, file objects in binary mode and `data:` URIs, sent as they are; Pillow images or
            uint8 arrays `(H, W)`, `(H, W, C)` or `(C, H, W)`, sent as pictures. The client fetches no URLs.
        content_ids: as for `encode_batch`.
        Raises InvalidItem for an image that is invalid or cannot be read, and EncodeFailed for a server that prepares
        no images.
        """
        call = self._call(options, ImageOptions)
        return self._encode(image_items(images, self._get_model(call), options), call)

    def encode_clips(self, clips: Sequence[Clip], **options: Unpack[ClipOptions]) -> list[Embedding]:
        """Encode clips, which the server prepares for its model; arguments and errors as for `encode`.

        clips: the chosen frames of each clip: a uint8 array `(F, H, W, 3)` or a sequence of Pillow images or arrays of
            one size. For a clip's file, whose frames the server chooses, use `Item.from_file`.
        content_ids, keep_ratio: as for `encode_batch`.
        """
        call = self._call(options, ClipOptions)
        return self._encode(clip_items(clips, self._get_model(call), options), call)

    def model(self, timeout: float | None = None, *, refresh: bool = False) -> Model:
        """The server's model and limits; cached until an error suggests that the server has another model.

        timeout: seconds; default: the client's, else 60 s.
        refresh: request it again, as a server may have restarted with another model.
        """
        return self._get_model(self._call({"timeout": timeout}), refresh=refresh)

    def health(self, service: str = "", timeout: float | None = None) -> str:
        """SERVING, NOT_SERVING, SERVICE_UNKNOWN or UNKNOWN, from one of the target's addresses.

        service: "" or "vitwire.v1.EncoderService" for readiness, "liveness" for the health of the engine.
        timeout: seconds; default: the client's, else 10 s.
        Raises Unavailable when no server answers; there are no retries.
        """
        context = self._context()
        with context.naming_errors():
            return self._shared.transport.health(service, self._deadline(timeout, HEALTH_SECONDS), context)

    def close(self) -> None:
        """Close the connections and cancel requests in flight. Has no effect on a client made by `with_options`."""
        if self._end():
            self._shared.transport.close()
            self._shared.nixl.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _encode(self, items: Sequence[Item], call: Call) -> list[Embedding]:
        unanswered = numbered(items)
        results: dict[int, Embedding | VitwireError] = {}
        if call.looks_up and unanswered:
            call = replace(call, shares=self._shares(unanswered, self._get_model(call)))  # pixels go where rows were
            results = dict(self._answers({index: without_pixels(item) for index, item in unanswered.items()}, call))
            unanswered = {index: item for index, item in unanswered.items() if needs_upload(results[index], item)}
        return in_order(results | dict(self._answers(unanswered, call)))

    def _answers(self, items: Mapping[int, Item], call: Call, calls: Calls | None = None) -> Generator[Any, None, None]:
        """Position and `Answer` of each item: of those that the call asks for. Raises errors of the whole request."""
        if not items:
            return
        model, transport, context = self._get_model(call), self._shared.transport, self._context()
        with self._observed(context, len(items)):
            parts = self._parts(items, call, model)
            with transport.slots.hold(call.deadline.left_to_wait()):
                deadline = self._covering(items, call)
                for result in transport.encode(parts, deadline, context, calls):
                    yield self._noted(result, context)

    def _get_model(self, call: Call, *, refresh: bool = False) -> Model:
        model = None if refresh else self._shared.model
        if model is None:
            context = self._context()
            with context.naming_errors():
                self._shared.model = model = self._shared.transport.model(call.deadline, context)
        return model
