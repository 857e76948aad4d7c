"""The synchronous client. `_aio.py` is the same for asyncio."""

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self, overload

from vitwire._ahead import Ahead
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
from vitwire._transport import Calls, Transport

if TYPE_CHECKING:
    from vitwire._prepare import Clip, ImageLike


class Client:
    """A connection to an encoder service. Thread-safe: share one, and close it when done.

    target: `host:port`, `dns:///name:port` (balanced over all addresses of the name) or `unix:path`.
    tls: True for TLS with the system's root certificates, a PEM file of root certificates, or gRPC channel credentials
        (from `grpc.ssl_channel_credentials`, for a client certificate); no TLS by default.
    token: bearer token, sent with every request.
    timeout: default seconds per call. None depends on the work: 60 s plus 25 ms per patch, with 10 minutes instead of
        60 s for priority "batch" or `wait_for_ready`. float("inf") waits without limit.
    spread: maximum RPCs that a request is split into, by tokens, to share it between replicas. "auto": one for each
        budget's worth of tokens, at most one per replica that answered within the last minute.
    affinity: send items with equal content ids to the same replica, whose cache may have them: RPCs are sent to the
        target's addresses by the hash of the content id, and each content id of a request is an RPC of its own.
    connections: maximum connections for requests of one message, and for streams; opened when requests overlap.
    max_retries: how often an RPC is sent again, within the timeout, when no server is ready, a server stops or does not
        answer, or a full server says when to retry; the count restarts whenever an item is answered.
    wait_for_ready: wait, within the timeout, for a server that is starting or loading its model.
    delivery: "stream": embeddings come in responses. "nixl": the server writes them into memory of this process
        through NIXL; a call fails where that is not possible. "auto": as "nixl" where possible, else as "stream".
    device: CUDA device, such as "cuda:0", that NIXL delivers to; None for host memory.
    delivery_bytes: memory for embeddings that NIXL delivers. Embeddings hold it until they are garbage-collected.

    Raises ValueError for an invalid target. docs/client.md has the details.
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
        self._transport = Transport(
            checked_target(target), credentials(tls), bearer(token), self._policy, connections, affinity=affinity
        )

    # -- calls -------------------------------------------------------------------------------------

    def encode(
        self,
        items: Sequence[Item],
        timeout: float | None = None,
        output_type: DType | None = None,
        priority: Priority = "interactive",
    ) -> list[Embedding]:
        """Encode items; returns their embeddings in the same order.

        timeout: seconds for the whole call, including preparation; default: the client's.
        output_type: type of the rows; default: the server's dtype.
        Raises the error of the first item that failed, with its position as `.item`, or the error of the request.
        """
        return self._encode(items, self._deadline(timeout), Options.of(output_type, priority))

    @overload
    def iter_encode(
        self,
        items: Iterable[Item],
        timeout: float | None = None,
        output_type: DType | None = None,
        priority: Priority = "interactive",
        *,
        return_exceptions: Literal[False] = False,
    ) -> Generator[tuple[int, Embedding], None, None]: ...

    @overload
    def iter_encode(
        self,
        items: Iterable[Item],
        timeout: float | None = None,
        output_type: DType | None = None,
        priority: Priority = "interactive",
        *,
        return_exceptions: Literal[True],
    ) -> Generator[Result, None, None]: ...

    def iter_encode(
        self,
        items: Iterable[Item],
        timeout: float | None = None,
        output_type: DType | None = None,
        priority: Priority = "interactive",
        *,
        return_exceptions: bool = False,
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
        """
        deadline = self._deadline(timeout)
        errors: list[VitwireError] = []
        options = Options.of(output_type, priority, stream=return_exceptions)
        for index, result in self._results_of(items, deadline, options):
            if isinstance(result, VitwireError) and not return_exceptions:
                errors.append(result)
            else:
                yield index, result
        if errors:
            raise min(errors, key=lambda error: error.item or 0)

    def encode_cached(
        self,
        items: Sequence[Item],
        timeout: float | None = None,
        output_type: DType | None = None,
        priority: Priority = "interactive",
    ) -> list[Embedding]:
        """As `encode`, but sends the pixels of items with a `content_id` only if the server has not cached them."""
        deadline, options = self._deadline(timeout), Options.of(output_type, priority)
        if not items:
            return []
        shares = self._shares(dict(enumerate(items)), self._get_model(deadline))  # also those of the uploads
        lookups = {index: without_pixels(item) for index, item in enumerate(items)}
        results = dict(self._results(lookups, deadline, options, shares=shares))
        uploads = {index: item for index, item in enumerate(items) if needs_upload(results[index], item)}
        return embeddings(results | dict(self._results(uploads, deadline, options, shares=shares)))

    def encode_images(
        self,
        images: "Sequence[ImageLike]",
        timeout: float | None = None,
        output_type: DType | None = None,
        priority: Priority = "interactive",
    ) -> list[Embedding]:
        """Encode images, prepared for the server's model; arguments and errors as for `encode`.

        images: paths, Pillow images or uint8 arrays `(H, W)`, `(H, W, C)` or `(C, H, W)`.
        Raises InvalidItem for an invalid image, and OSError for a file that cannot be opened.
        """
        deadline, options = self._deadline(timeout), Options.of(output_type, priority)
        return self._encode(image_items(images, self._get_model(deadline)), deadline, options)

    def encode_clips(
        self,
        clips: "Sequence[Clip]",
        timeout: float | None = None,
        output_type: DType | None = None,
        priority: Priority = "interactive",
    ) -> list[Embedding]:
        """Encode clips, prepared for the server's model; arguments and errors as for `encode`.

        clips: the sampled frames of each clip: a uint8 array `(F, H, W, 3)` or a sequence of images of one size.
        """
        deadline, options = self._deadline(timeout), Options.of(output_type, priority)
        return self._encode(clip_items(clips, self._get_model(deadline)), deadline, options)

    def model(self, timeout: float | None = None) -> Model:
        """The server's model and limits; cached until an error suggests that the server has another model.

        timeout: seconds; default: the client's, else 60 s.
        """
        return self._get_model(self._deadline(timeout))

    def health(self, service: str = "", timeout: float | None = None) -> str:
        """SERVING, NOT_SERVING, SERVICE_UNKNOWN or UNKNOWN, from one of the target's addresses.

        service: "" or "vitwire.v1.EncoderService" for readiness, "liveness" for the health of the engine.
        timeout: seconds; default: the client's, else 10 s.
        Raises Unavailable when no server answers; there are no retries.
        """
        return self._transport.health(service, self._deadline(timeout, HEALTH_SECONDS))

    def close(self) -> None:
        """Close the connection and cancel requests in flight."""
        self._transport.close()
        self._nixl.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _encode(self, items: Sequence[Item], deadline: Deadline, options: Options) -> list[Embedding]:
        return embeddings(dict(self._results(dict(enumerate(items)), deadline, options)))

    def _results_of(self, items: Iterable[Item], deadline: Deadline, options: Options) -> Generator[Result, None, None]:
        """As `_results`; an iterable that is not a sequence is read ahead."""
        if isinstance(items, Sequence):
            return self._results(dict(enumerate(items)), deadline, options)
        return Ahead(items, lambda group, calls: self._results(group, deadline.for_request(), options, calls)).results()

    def _results(
        self,
        items: Mapping[int, Item],
        deadline: Deadline,
        options: Options,
        calls: Calls | None = None,
        shares: Sequence[Share] | None = None,
    ) -> Generator[Result, None, None]:
        """Embedding or error of each item, by position. Raises errors of the whole request."""
        if not items:
            return
        model = self._get_model(deadline)
        options = replace(options, leasing=self._nixl.leasing(model, options.output_type))
        parts = parts_of(items, shares or self._shares(items, model), options, model)
        deadline = deadline.covering(items.values(), patient=options.patient or self._policy.wait_for_ready)
        try:
            for index, result in self._transport.encode(parts, model.deepstack_levels, deadline, calls):
                if isinstance(result, VitwireError):
                    self._forget_model_after(result)
                yield index, result
        except VitwireError as error:
            self._forget_model_after(error)
            raise

    def _get_model(self, deadline: Deadline) -> Model:
        if self._model is None:
            self._model = self._transport.model(deadline)
        return self._model

    def _shares(self, items: Mapping[int, Item], model: Model) -> list[Share]:
        return self._balancing.shares(items, model, self._transport.replicas.count())

    def _forget_model_after(self, error: VitwireError) -> None:
        """Forget the model if the error may mean that the server has another one now."""
        if may_mean_other_model(error):
            self._model = None

    def _deadline(self, timeout: float | None, default: float = MODEL_SECONDS) -> Deadline:
        return Deadline(self._timeout if timeout is None else timeout, default)
