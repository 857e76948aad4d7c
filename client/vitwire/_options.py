"""The arguments of both clients and of their calls, each described once."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import TypedDict

from vitwire._delivery.nixl import POOL_BYTES, Delivery
from vitwire._transport.attempts import MAX_RETRIES, Deadline, Policy
from vitwire._transport.balancing import Balancing, Spread
from vitwire._transport.channel import Tls
from vitwire._transport.connections import CONNECTIONS
from vitwire._transport.context import Metadata, Token, checked_metadata, checked_target, checked_token
from vitwire._transport.protocol import Options, Priority
from vitwire.embeddings import DType


class CallOptions(TypedDict, total=False):
    """Of every method that encodes; None, or left out: the client's."""

    timeout: float | None
    output_type: DType | None
    priority: Priority | None


class DerivedOptions(CallOptions, total=False):
    """Of `with_options`; None, or left out: as before."""

    spread: Spread | None
    affinity: bool | None
    max_retries: int | None
    wait_for_ready: bool | None
    metadata: Mapping[str, str] | None


class ConstructorOptions(TypedDict, total=False):
    """Of the constructors, after the target: the fields of `ClientOptions`, which has the defaults."""

    tls: Tls
    token: Token
    timeout: float | None
    output_type: DType | None
    priority: Priority
    spread: Spread
    affinity: bool
    connections: int
    max_in_flight: int | None
    max_retries: int
    wait_for_ready: bool
    metadata: Mapping[str, str] | None
    channel_options: Mapping[str, int | str] | None
    delivery: Delivery
    device: str | None
    delivery_bytes: int


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
        Deadline(self.timeout, 0.0)
        Options.of(self.output_type, self.priority)
        _ = self.balancing, self.policy  # which check their arguments

    @property
    def balancing(self) -> Balancing:
        return Balancing(self.spread, self.affinity)

    @property
    def policy(self) -> Policy:
        return Policy(self.max_retries, self.wait_for_ready)

    @property
    def headers(self) -> Metadata:
        """The caller's metadata as pairs."""
        return tuple((self.metadata or {}).items())
