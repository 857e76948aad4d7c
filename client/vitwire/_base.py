"""What both clients share: their arguments, and everything about a call but its I/O."""

import inspect
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, Protocol, Self, TypeVar

import grpc

from vitwire._delivery.nixl import POOL_BYTES, Delivery, Nixl
from vitwire._transport.balancing import Balancing, Replicas, Share, Spread
from vitwire._transport.channel import Channels, Tls
from vitwire._transport.connections import CONNECTIONS
from vitwire._transport.context import Context, Metadata, Token, checked_metadata, checked_token, log
from vitwire._transport.deadline import MODEL_SECONDS, Deadline
from vitwire._transport.exchange import may_mean_other_model
from vitwire._transport.protocol import Answer, Options, Part, Priority, parts_of
from vitwire._transport.retry import MAX_RETRIES, Policy
from vitwire._transport.target import checked_target
from vitwire.embeddings import DType
from vitwire.errors import VitwireError
from vitwire.items import Item
from vitwire.model import Model


class _Transport(Protocol):
    @property
    def replicas(self) -> Replicas: ...


T = TypeVar("T", bound=_Transport)


@dataclass(frozen=True, slots=True)
class Defaults:
    """Settings of calls, which `with_options` changes. Raises ValueError."""

    timeout: float | None
    output_type: DType | None
    priority: Priority
    balancing: Balancing
    policy: Policy
    metadata: Metadata = field(repr=False)

    def __post_init__(self) -> None:
        Deadline(self.timeout, 0.0)
        Options.of(self.output_type, self.priority)


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
    arguments: Mapping[str, Any] = field(repr=False)
    """Of the first client, besides its defaults."""
    model: Model | None = None
    is_closed: bool = False


class BaseClient(ABC, Generic[T]):
    """See `Client` for the arguments."""

    def __init__(
        self,
        target: str | None = None,
        *,
        tls: Tls = None,
        token: Token = None,
        timeout: float | None = None,
        output_type: DType | None = None,
        priority: Priority = "interactive",
        spread: Spread = 1,
        affinity: bool = False,
        connections: int = CONNECTIONS,
        max_in_flight: int | None = None,
        max_retries: int = MAX_RETRIES,
        wait_for_ready: bool = False,
        metadata: Mapping[str, str] | None = None,
        channel_options: Mapping[str, int | str] | None = None,
        delivery: Delivery = "auto",
        device: str | None = None,
        delivery_bytes: int = POOL_BYTES,
    ) -> None:
        target = checked_target(target)
        self._token = checked_token(token)
        self._defaults = Defaults(
            timeout,
            output_type,
            priority,
            Balancing(spread, affinity),
            Policy(max_retries, wait_for_ready),
            checked_metadata(metadata, token),
        )
        self._shared = Shared(
            self._connected(Channels.of(target, tls, channel_options), connections, max_in_flight),
            Nixl(delivery, device, delivery_bytes),
            {
                "target": target,
                "tls": tls,
                "token": token,
                "connections": connections,
                "max_in_flight": max_in_flight,
                "channel_options": channel_options,
                "delivery": delivery,
                "device": device,
                "delivery_bytes": delivery_bytes,
            },
        )
        self._is_derived = False

    @staticmethod
    @abstractmethod
    def _connected(channels: Channels, connections: int, max_in_flight: int | None) -> T:
        """The transport of a new client."""

    def with_options(
        self,
        *,
        timeout: float | None = None,
        output_type: DType | None = None,
        priority: Priority | None = None,
        spread: Spread | None = None,
        affinity: bool | None = None,
        max_retries: int | None = None,
        wait_for_ready: bool | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Self:
        """A client with other defaults, on the same connections and within the same limits.

        Arguments that are None keep their value; `metadata` is added to that of this client. Closing the new client
        has no effect: it ends with the one that was made first. Raises ValueError.
        """
        old = self._defaults
        policy = Policy(
            old.policy.max_retries if max_retries is None else max_retries,
            old.policy.wait_for_ready if wait_for_ready is None else wait_for_ready,
        )
        derived = object.__new__(type(self))
        derived._token, derived._shared, derived._is_derived = self._token, self._shared, True
        derived._defaults = Defaults(
            old.timeout if timeout is None else timeout,
            output_type or old.output_type,
            priority or old.priority,
            Balancing(
                old.balancing.spread if spread is None else spread,
                old.balancing.affinity if affinity is None else affinity,
            ),
            policy,
            tuple((dict(old.metadata) | dict(checked_metadata(metadata, self._token))).items()),
        )
        return derived

    @property
    def is_closed(self) -> bool:
        """Whether the client is closed: calls then raise RuntimeError."""
        return self._shared.is_closed

    def __repr__(self) -> str:
        """The arguments that are not defaults, without the token and the values of metadata."""
        arguments = self._arguments()
        shown = [repr(arguments.pop("target"))]
        for name, value in arguments.items():
            if value == inspect.signature(BaseClient).parameters[name].default:
                continue
            hidden = {"token": "***", "metadata": dict.fromkeys(value, "***") if name == "metadata" else None}
            shown.append(f"{name}={hidden.get(name) or value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled client has the same arguments, with the token, and connections of its own."""
        arguments = self._arguments()
        if isinstance(arguments["tls"], grpc.ChannelCredentials):
            raise TypeError("gRPC channel credentials cannot be pickled: pass `tls` as True or a file of certificates")
        return partial(type(self), **arguments), ()

    def _arguments(self) -> dict[str, Any]:
        """The arguments for an equal client."""
        defaults = self._defaults
        return {
            **self._shared.arguments,
            "timeout": defaults.timeout,
            "output_type": defaults.output_type,
            "priority": defaults.priority,
            "spread": defaults.balancing.spread,
            "affinity": defaults.balancing.affinity,
            "max_retries": defaults.policy.max_retries,
            "wait_for_ready": defaults.policy.wait_for_ready,
            "metadata": dict(defaults.metadata) or None,
        }

    # -- calls -------------------------------------------------------------------------------------

    def _call(
        self,
        timeout: float | None,
        output_type: DType | None = None,
        priority: Priority | None = None,
        *,
        stream: bool = False,
        store_only: bool = False,
    ) -> Call:
        """Raises ValueError for an invalid argument."""
        defaults = self._defaults
        # The server accepts an item that is streamed before its bytes have arrived.
        stream = stream or store_only
        options = Options.of(output_type or defaults.output_type, priority or defaults.priority, stream=stream)
        return Call(self._deadline(timeout), replace(options, store_only=store_only))

    def _deadline(self, timeout: float | None, default: float = MODEL_SECONDS) -> Deadline:
        return Deadline(self._defaults.timeout if timeout is None else timeout, default)

    def _context(self) -> Context:
        """Of a new request."""
        return Context.of(self._token, self._defaults.metadata, self._defaults.policy)

    def _shares(self, items: Mapping[int, Item], model: Model) -> list[Share]:
        """How a request is split into RPCs."""
        return self._defaults.balancing.shares(items, model, self._shared.transport.replicas.count())

    def _parts(self, items: Mapping[int, Item], call: Call, model: Model) -> list[Part]:
        """The RPCs of a request."""
        options = call.options
        if not options.store_only:
            options = replace(options, leasing=self._shared.nixl.leasing(model, options.output_type))
        shares = self._shares(items, model) if call.shares is None else call.shares
        return parts_of(items, shares, options, model)

    def _covering(self, items: Mapping[int, Item], call: Call) -> Deadline:
        """The deadline of a request that begins now."""
        patient = call.options.patient or self._defaults.policy.wait_for_ready
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
