"""The arguments of both clients, and everything about their requests but their I/O."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from functools import partial
from inspect import signature
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeAlias, TypeVar, Unpack

import grpc

from vitwire._arguments import CallOptions
from vitwire._delivery.answers import Answer
from vitwire._delivery.nixl import POOL_BYTES, Delivery, Nixl
from vitwire._transport.aio_calls import AsyncTransport
from vitwire._transport.attempts import MAX_RETRIES, MODEL_SECONDS, Deadline, Policy
from vitwire._transport.balancing import Balancing, Share, Spread
from vitwire._transport.calls import Transport
from vitwire._transport.channel import Channels, Tls, checked_target
from vitwire._transport.connections import CONNECTIONS
from vitwire._transport.context import Context, Token, checked_metadata, checked_token, log
from vitwire._transport.exchange import may_mean_other_model
from vitwire._transport.protocol import Options, Part, parts_of
from vitwire.embeddings import DType
from vitwire.errors import VitwireError
from vitwire.items import Item, Priority
from vitwire.model import Model

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T", Transport, AsyncTransport)
_Taking: TypeAlias = Callable[[S, "ClientOptions"], None]
_LEAST = {"connections": 1, "max_in_flight": 1, "max_retries": 0, "delivery_bytes": 1}


class DerivedOptions(CallOptions, total=False):
    """Options of `with_options`; None, or left out: as before."""

    spread: Spread | None
    affinity: bool | None
    max_retries: int | None
    wait_for_ready: bool | None
    metadata: Mapping[str, str] | None


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """The arguments of a client, checked; `Client` documents them. Raises ValueError."""

    target: str | None = None
    """Never None in an instance: the environment's by default."""
    _: KW_ONLY
    tls: Tls = None
    token: Token = field(default=None, repr=False)
    timeout: float | None = None
    output_type: DType | None = None
    priority: Priority = "interactive"
    spread: Spread = 1
    affinity: bool = False
    connections: int = CONNECTIONS
    max_in_flight: int | None = None
    max_retries: int = MAX_RETRIES
    wait_for_ready: bool = False
    metadata: Mapping[str, str] | None = field(default=None, repr=False)
    channel_options: Mapping[str, int | str] | None = None
    delivery: Delivery = "auto"
    device: str | None = None
    delivery_bytes: int = POOL_BYTES

    def __post_init__(self) -> None:
        object.__setattr__(self, "target", checked_target(self.target))
        checked_token(self.token)
        object.__setattr__(self, "metadata", dict(checked_metadata(self.metadata, self.token)) or None)
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        Deadline(self.timeout, 0.0)
        Options.of(self.output_type, self.priority)
        _ = self.balancing  # which checks its arguments

    @property
    def balancing(self) -> Balancing:
        return Balancing(self.spread, self.affinity)


def _taking(options: Callable[P, ClientOptions]) -> "Callable[[_Taking[S]], Callable[Concatenate[S, P], None]]":
    """Gives a constructor the arguments of `options`, which it gets as one object."""

    def decorate(constructor: "_Taking[S]") -> Callable[Concatenate[S, P], None]:
        def init(self: S, /, *args: P.args, **named: P.kwargs) -> None:
            constructor(self, options(*args, **named))

        return init

    return decorate


@dataclass(frozen=True, slots=True)
class Call:
    deadline: Deadline
    options: Options
    looks_up: bool = False
    """Whether items with a content_id are sent with their content only if they are not cached."""
    shares: Sequence[Share] | None = None
    """The split of the items into RPCs, if it is known beforehand."""

    def for_request(self) -> "Call":
        """The same for one of many requests."""
        return replace(self, deadline=self.deadline.for_request())


@dataclass(slots=True)
class Shared(Generic[T]):
    """State that clients made by `with_options` share with the first one."""

    transport: T
    nixl: Nixl
    model: Model | None = None
    is_closed: bool = False


class BaseClient(Generic[T]):
    """See `Client` for the arguments."""

    __signature__ = signature(ClientOptions)
    _make_transport: type[T]

    @_taking(ClientOptions)
    def __init__(self, options: ClientOptions) -> None:
        self._options = options
        assert options.target, "checked"
        channels = Channels.of(options.target, options.tls, options.channel_options)
        transport = self._make_transport(channels, options.connections, options.max_in_flight)
        self._shared: Shared[T] = Shared(transport, Nixl(options.delivery, options.device, options.delivery_bytes))
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
        """The target alone: other arguments may be secrets."""
        return f"{type(self).__name__}({self._options.target!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled client has the same arguments, with the token, and connections of its own."""
        if isinstance(self._options.tls, grpc.ChannelCredentials):
            raise TypeError("gRPC channel credentials cannot be pickled: pass `tls` as True or a file of certificates")
        arguments = {each.name: getattr(self._options, each.name) for each in fields(ClientOptions)}
        return partial(type(self), **arguments), ()

    # -- calls -------------------------------------------------------------------------------------

    def _call(
        self,
        options: CallOptions,
        known: type[CallOptions] = CallOptions,
        *,
        stream: bool = False,
        store_only: bool = False,
        looks_up: bool = False,
    ) -> Call:
        """Raises ValueError for an invalid argument, and TypeError for an unknown one."""
        _check_names(options, known)
        looks_up = looks_up or options.get("content_ids") is not None
        wire = Options.of(
            options.get("output_type") or self._options.output_type,
            options.get("priority") or self._options.priority,
            stream=stream,
        )
        wire = replace(wire, store_only=store_only, in_groups=bool(options.get("groups")))
        return Call(self._deadline(options.get("timeout")), wire, looks_up)

    def _deadline(self, timeout: float | None, default: float = MODEL_SECONDS) -> Deadline:
        return Deadline(self._options.timeout if timeout is None else timeout, default)

    def _context(self) -> Context:
        own = self._options
        headers = tuple((own.metadata or {}).items())
        return Context.of(own.token, headers, Policy(own.max_retries, own.wait_for_ready))

    def _shares(self, items: Mapping[int, Item], model: Model) -> list[Share]:
        return self._options.balancing.shares(items, model, self._shared.transport.replicas.count())

    def _parts(self, items: Mapping[int, Item], call: Call, model: Model) -> list[Part]:
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
        """Mark the shared state as closed; False for a derived client, which closes nothing."""
        if self._is_derived:
            return False
        self._shared.is_closed = True
        return True


def _check_names(options: Mapping[str, object], known: type[CallOptions]) -> None:
    """Raises TypeError for an unknown argument."""
    if unknown := options.keys() - known.__annotations__.keys():
        raise TypeError(f"unexpected keyword arguments: {', '.join(sorted(unknown))}")
