"""The client for threads. `_aio.py` holds its twin for asyncio."""

from collections.abc import Generator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, overload

from vitwire._channel import Tls, bearer, credentials
from vitwire._deadline import HEALTH_SECONDS, MODEL_SECONDS, Deadline
from vitwire._embedding import DType, Embedding
from vitwire._errors import VitwireError
from vitwire._exchange import may_speak_of_another_model
from vitwire._items import Item, without_pixels
from vitwire._model import Model
from vitwire._prepare import clip_items, image_items
from vitwire._protocol import Options, Priority, Result, embeddings, is_unknown, split
from vitwire._retry import MAX_RETRIES, Policy
from vitwire._target import checked_target
from vitwire._transport import Transport

if TYPE_CHECKING:
    from vitwire._prepare import Clip, ImageLike


class Client:
    """A connection to one encoder service; thread-safe: share it, and close it.

    target: `host:port`, `dns:///name:port` (balanced over all addresses behind the name) or `unix:path`.
    tls: True for TLS with the system's roots, a file of root certificates in PEM, or gRPC channel credentials
        (those of `grpc.ssl_channel_credentials` for a client certificate); by default none.
    token: bearer token, sent with every request.
    timeout: seconds for each call that is given none. None fits the work: 60 s and 25 ms for each patch, and 10
        minutes instead of the 60 s with priority "batch" or `wait_for_ready`. float("inf") waits for ever.
    spread: RPCs that one request may be split into, so that as many replicas share it.
    max_retries: how often an RPC is sent again, within the timeout, when no server is ready, a server ends or does not
        answer, or the server is full and says when to come back; counted anew when something was answered.
    wait_for_ready: wait, within the timeout, for a server that is not there yet or still loads its model.

    Raises ValueError for a target that cannot be connected to. docs/client.md has the details.
    """

    def __init__(
        self,
        target: str,
        *,
        tls: Tls = None,
        token: str | None = None,
        timeout: float | None = None,
        spread: int = 1,
        max_retries: int = MAX_RETRIES,
        wait_for_ready: bool = False,
    ) -> None:
        if spread < 1:
            raise ValueError(f"spread is at least 1, not {spread}")
        self._policy = Policy(max_retries, wait_for_ready)
        self._timeout = timeout
        self._spread = spread
        self._model: Model | None = None
        self._transport = Transport(checked_target(target), credentials(tls), bearer(token), self._policy)

    # -- calls -------------------------------------------------------------------------------------

    def encode(
        self,
        items: Sequence[Item],
        timeout: float | None = None,
        output_type: DType | None = None,
        priority: Priority = "interactive",
    ) -> list[Embedding]:
        """Encode items; their embeddings come in the same order.

        timeout: seconds for the whole call, preparation included; None takes the client's.
        output_type: type of the rows; None takes the server's dtype.
        Raises the error of the first item that failed, with its position as `.item`, or that of the request.
        """
        return self._encode(items, self._deadline(timeout), Options.of(output_type, priority))

    @overload
    def iter_encode(
        self,
        items: Sequence[Item],
        timeout: float | None = None,
        output_type: DType | None = None,
        priority: Priority = "interactive",
        *,
        return_exceptions: Literal[False] = False,
    ) -> Generator[tuple[int, Embedding], None, None]: ...

    @overload
    def iter_encode(
        self,
        items: Sequence[Item],
        timeout: float | None = None,
        output_type: DType | None = None,
        priority: Priority = "interactive",
        *,
        return_exceptions: Literal[True],
    ) -> Generator[Result, None, None]: ...

    def iter_encode(
        self,
        items: Sequence[Item],
        timeout: float | None = None,
        output_type: DType | None = None,
        priority: Priority = "interactive",
        *,
        return_exceptions: bool = False,
    ) -> Generator[Any, None, None]:
        """Yield `(position, embedding)` of each item once it is ready; leaving the loop cancels the rest.

        An item that failed does not stop the others: its error is raised after all of them were yielded,
        the first one's if there are several. What ends the whole request is raised at once: without
        `return_exceptions` a request of up to 4 MiB is one message, which a single item that the server finds
        invalid refuses as a whole (InvalidItem names it). The other arguments are `encode`'s.

        return_exceptions: yield an item's error in the embedding's place; the request is a stream, however small,
            so that invalid items fail alone too.
        """
        asked = dict(enumerate(items))
        deadline = self._deadline(timeout)
        errors: list[VitwireError] = []
        options = Options.of(output_type, priority, stream=return_exceptions)
        for index, result in self._results(asked, deadline, options):
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
        """As `encode`, but pixels of an item with a `content_id` are sent only if the server does not know it."""
        asked, deadline, options = dict(enumerate(items)), self._deadline(timeout), Options.of(output_type, priority)
        asks = {index: without_pixels(item) for index, item in asked.items()}
        results = dict(self._results(asks, deadline, options))
        unknown = {index: item for index, item in asked.items() if is_unknown(results[index], item)}
        return embeddings(results | dict(self._results(unknown, deadline, options)))

    def encode_images(
        self,
        images: "Sequence[ImageLike]",
        timeout: float | None = None,
        output_type: DType | None = None,
        priority: Priority = "interactive",
    ) -> list[Embedding]:
        """Encode images, prepared as the server's model wants them; arguments and errors as of `encode`.

        images: paths, Pillow images or uint8 arrays `(H, W)`, `(H, W, C)` or `(C, H, W)`.
        Raises InvalidItem for what is no image, and OSError for a file that cannot be opened.
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
        """Encode clips, prepared as the server's model wants them; arguments and errors as of `encode`.

        clips: for each, its sampled frames: a uint8 array `(F, H, W, 3)` or a sequence of images of one size.
        """
        deadline, options = self._deadline(timeout), Options.of(output_type, priority)
        return self._encode(clip_items(clips, self._get_model(deadline)), deadline, options)

    def model(self, timeout: float | None = None) -> Model:
        """The server's model and limits; remembered until a request fails in a way that may come of another model.

        timeout: seconds; None takes the client's, and 60 s if that has none.
        """
        return self._get_model(self._deadline(timeout))

    def health(self, service: str = "", timeout: float | None = None) -> str:
        """SERVING, NOT_SERVING, SERVICE_UNKNOWN or UNKNOWN, of one of the addresses behind the target.

        service: "" or "vitwire.v1.EncoderService" for readiness, "liveness" for the engine's heartbeat.
        timeout: seconds; None takes the client's, and 10 s if that has none.
        Raises Unavailable when no server answers; it is asked once.
        """
        return self._transport.health(service, self._deadline(timeout, HEALTH_SECONDS))

    def close(self) -> None:
        """Close the connection and cancel what is in flight."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _encode(self, items: Sequence[Item], deadline: Deadline, options: Options) -> list[Embedding]:
        return embeddings(dict(self._results(dict(enumerate(items)), deadline, options)))

    def _results(
        self, items: Mapping[int, Item], deadline: Deadline, options: Options
    ) -> Generator[Result, None, None]:
        """Embedding or error of each item, by position. Raises what ends the whole request."""
        if not items:
            return
        model = self._get_model(deadline)
        parts = split(items, options, self._spread, model)
        deadline = deadline.covering(items.values(), patient=options.patient or self._policy.wait_for_ready)
        try:
            for index, result in self._transport.encode(parts, model.deepstack_levels, deadline):
                if isinstance(result, VitwireError):
                    self._review_model(result)
                yield index, result
        except VitwireError as error:
            self._review_model(error)
            raise

    def _get_model(self, deadline: Deadline) -> Model:
        if self._model is None:
            self._model = self._transport.model(deadline)
        return self._model

    def _review_model(self, error: VitwireError) -> None:
        """Forget the model if the error may come of the server holding another one by now."""
        if may_speak_of_another_model(error):
            self._model = None

    def _deadline(self, timeout: float | None, default: float = MODEL_SECONDS) -> Deadline:
        return Deadline(self._timeout if timeout is None else timeout, default)
