"""Everything about the requests of both clients but their I/O."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from inspect import signature
from typing import Any, Generic, Protocol, Self, TypeVar, Unpack

import grpc

from vitwire._delivery.answers import Answer
from vitwire._delivery.nixl import Nixl
from vitwire._options import CallOptions, ClientOptions, ConstructorOptions, DerivedOptions
from vitwire._transport.attempts import MODEL_SECONDS, Deadline
from vitwire._transport.balancing import Replicas, Share
from vitwire._transport.channel import Channels
from vitwire._transport.context import Context, checked_metadata, log
from vitwire._transport.exchange import may_mean_other_model
from vitwire._transport.protocol import Options, Part, parts_of
from vitwire.errors import VitwireError
from vitwire.items import Item
from vitwire.model import Model


class _Transport(Protocol):
    def __init__(self, channels: Channels, connections: int, max_in_flight: int | None) -> None: ...

    @property
    def replicas(self) -> Replicas: ...


T = TypeVar("T", bound=_Transport)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a method."""

    deadline: Deadline
    options: Options
    shares: Sequence[Share] | None = None
    """How the items are split into RPCs, if that is known beforehand."""

    def for_request(self) -> "Call":
        """The same for one of many requests."""
        return replace(self, deadline=self.deadline.for_request())


@dataclass(slots=True)
class Shared(Generic[T]):
    """What clients that were made by `with_options` share with the first one."""

    transport: T
    nixl: Nixl
    model: Model | None = None
    is_closed: bool = False


class BaseClient(Generic[T]):
    """See `Client` for the arguments."""

    __signature__ = signature(ClientOptions)
    _make_transport: type[T]

    def __init__(self, target: str | None = None, **options: Unpack[ConstructorOptions]) -> None:
        own = self._options = ClientOptions(target, **options)
        assert own.target, "checked"
        channels = Channels.of(own.target, own.tls, own.channel_options)
        transport = self._make_transport(channels, own.connections, own.max_in_flight)
        self._shared = Shared(transport, Nixl(own.delivery, own.device, own.delivery_bytes))
        self._is_derived = False

    def with_options(self, **options: Unpack[DerivedOptions]) -> Self:
        """A client with other defaults, on the same connections and within the same limits.

        Arguments that are None keep their value; `metadata` is added to that of this client. Closing the new client
        has no effect: it ends with the one that was made first. Raises ValueError.
        """
        _check_names(options, DerivedOptions)
        old = self._options
        changed: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        if metadata := options.get("metadata"):
            changed["metadata"] = {**(old.metadata or {}), **dict(checked_metadata(metadata, old.token))}
        derived = object.__new__(type(self))
        derived._options, derived._shared, derived._is_derived = replace(old, **changed), self._shared, True
        return derived

    @property
    def is_closed(self) -> bool:
        """Whether the client is closed: calls then raise RuntimeError."""
        return self._shared.is_closed

    def __repr__(self) -> str:
        """The arguments that are not defaults, without the token and the values of metadata."""
        shown = [repr(self._options.target)]
        for each in fields(ClientOptions)[1:]:
            value = getattr(self._options, each.name)
            if value == each.default:
                continue
            hidden = {"token": "***", "metadata": dict.fromkeys(value, "***") if each.name == "metadata" else None}
            shown.append(f"{each.name}={hidden.get(each.name) or value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled client has the same arguments, with the token, and connections of its own."""
        if isinstance(self._options.tls, grpc.ChannelCredentials):
            raise TypeError("gRPC channel credentials cannot be pickled: pass `tls` as True or a file of certificates")
        arguments = {each.name: getattr(self._options, each.name) for each in fields(ClientOptions)}
        return partial(type(self), **arguments), ()

    # -- calls -------------------------------------------------------------------------------------

    def _call(self, options: CallOptions, *, stream: bool = False, store_only: bool = False) -> Call:
        """Raises ValueError for an invalid argument, and TypeError for an unknown one."""
        _check_names(options, CallOptions)
        # The server accepts an item that is streamed before its bytes have arrived.
        wire = Options.of(
            options.get("output_type") or self._options.output_type,
            options.get("priority") or self._options.priority,
            stream=stream or store_only,
        )
        return Call(self._deadline(options.get("timeout")), replace(wire, store_only=store_only))

    def _deadline(self, timeout: float | None, default: float = MODEL_SECONDS) -> Deadline:
        return Deadline(self._options.timeout if timeout is None else timeout, default)

    def _context(self) -> Context:
        """Of a new request."""
        return Context.of(self._options.token, self._options.headers, self._options.policy)

    def _shares(self, items: Mapping[int, Item], model: Model) -> list[Share]:
        """How a request is split into RPCs."""
        return self._options.balancing.shares(items, model, self._shared.transport.replicas.count())

    def _parts(self, items: Mapping[int, Item], call: Call, model: Model) -> list[Part]:
        """The RPCs of a request."""
        options = call.options
        if not options.store_only:
            options = replace(options, leasing=self._shared.nixl.leasing(model, options.output_type))
        shares = self._shares(items, model) if call.shares is None else call.shares
        return parts_of(items, shares, options, model)

    def _covering(self, items: Mapping[int, Item], call: Call) -> Deadline:
        """The deadline of a request that begins now."""
        patient = call.options.patient or self._options.wait_for_ready
        return call.deadline.covering(items.values(), patient=patient)

    @contextmanager
    def _observed(self, context: Context, count: int) -> Iterator[None]:
        """Log the request in the block; its errors have its id."""
        start = time.monotonic()
        log.debug("request %s: encoding %d items", context.request_id, count)
        try:
            with context.naming_errors():
                yield
        except VitwireError as error:
            self._forget_model_after(error)
            log.debug("request %s: failed after %.3f s: %r", context.request_id, time.monotonic() - start, error)
            raise
        log.debug("request %s: done in %.3f s", context.request_id, time.monotonic() - start)

    def _noted(self, result: Answer, context: Context) -> Answer:
        """A result, with the id of its request if it is an error."""
        if isinstance(result[1], VitwireError):
            self._forget_model_after(context.name(result[1]))
        return result

    def _forget_model_after(self, error: VitwireError) -> None:
        """Forget the model if the error may mean that the server has another one now."""
        if may_mean_other_model(error):
            self._shared.model = None

    def _end(self) -> bool:
        """Whether to close what this client shares with those derived from it."""
        if self._is_derived:
            return False
        self._shared.is_closed = True
        return True


def _check_names(options: Mapping[str, object], known: type[CallOptions]) -> None:
    """Raises TypeError for an unknown argument."""
    if unknown := options.keys() - known.__annotations__.keys():
        raise TypeError(f"unexpected keyword arguments: {', '.join(sorted(unknown))}")
