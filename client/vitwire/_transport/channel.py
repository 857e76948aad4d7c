"""Arguments of both clients for gRPC: target, options, credentials, methods and health messages."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

import grpc
import grpc.aio
from google.protobuf.wrappers_pb2 import Int32Value, StringValue

from vitwire._transport import unary_streams
from vitwire._transport.attempts import KEEPALIVE_SECONDS, KEEPALIVE_TIMEOUT
from vitwire._transport.balancing import CONTENT_HEADER
from vitwire._transport.diagnosis import Security
from vitwire.v1 import encoder_pb2 as pb
from vitwire.wire import Frame, Malformed, Request, read_chunk, read_plain, write_chunk, write_request

Q = TypeVar("Q")
R = TypeVar("R")
Tls = bool | str | os.PathLike[str] | grpc.ChannelCredentials | None
ChannelOptions = tuple[tuple[str, int | str], ...]

SERVICE = "vitwire.v1.EncoderService"
VARIABLE = "VITWIRE_TARGET"
PORT = 50051
"""On which servers listen unless `--port` says otherwise."""
_MAX_PORT = 65535
_FORMS = f"expected host:port, dns:///name:port, ipv4:address:port,address:port or unix:path; default port: {PORT}"

REASON_SECONDS = 1.0
"""Seconds to find out why no server is ready."""
_RING_HASH_HEADER = "GRPC_EXPERIMENTAL_RING_HASH_SET_REQUEST_HASH_KEY"
"""Environment variable that enables gRPC's ring hash on a header (gRFC A76), which 1.85 does not do by default."""


def _service_config(policy: str, **settings: object) -> tuple[str, str]:
    config = {"loadBalancingConfig": [{policy: settings}], "healthCheckConfig": {"serviceName": SERVICE}}
    return "grpc.service_config", json.dumps(config)


_COMMON_OPTIONS: ChannelOptions = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # No retries in gRPC: with them, in 1.85, RPCs hang beyond their deadline if no server is left, and client streams
    # lose messages. `attempts.Attempts` decides about retries.
    ("grpc.enable_retries", 0),
    # Reconnect within half a second to a server that is back.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 400),
    # Timeout of a connection attempt: a frozen server accepts the connection but does not answer.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    # Detect a frozen or vanished server within 20 s. Pings are sent while a call is open; the health watch of each
    # connection always is. By default gRPC stops after two pings without data.
    ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT * 1000),
    ("grpc.http2.max_pings_without_data", 0),
    # Resolve names again soon after a connection ends, not 30 s after the last resolution: replicas come and go.
    ("grpc.dns_min_time_between_resolutions_ms", 2_000),
    # gRPC 1.85 waits a minute for the answer to a ping by default.
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT * 1000),
)
OPTIONS: ChannelOptions = (*_COMMON_OPTIONS, _service_config("round_robin"))
_OWN_CONNECTIONS = ("grpc.use_local_subchannel_pool", 1)
"""Else gRPC shares one connection between all channels with the same options."""
BULK_OPTIONS: ChannelOptions = (*OPTIONS, _OWN_CONNECTIONS)
_ROUTED_OPTIONS: ChannelOptions = (
    *_COMMON_OPTIONS,
    _service_config("ring_hash_experimental", requestHashHeader=CONTENT_HEADER),
    _OWN_CONNECTIONS,
)
HEALTH_OPTIONS = _COMMON_OPTIONS
"""Without health checking, which would hide the unhealthy servers that are queried."""


class StreamCall(Protocol):
    """An RPC with a response stream; gRPC's own class is private."""

    def __iter__(self) -> Iterator[bytes]: ...

    def trailing_metadata(self) -> Iterable[tuple[str, str | bytes]] | None: ...

    def cancel(self) -> object: ...


@dataclass(frozen=True, slots=True)
class Channels:
    """Settings that the channels of a client have in common."""

    target: str
    credentials: grpc.ChannelCredentials | None = field(repr=False)
    security: Security
    options: Mapping[str, int | str] | None = None
    """gRPC's options that replace the client's."""

    @classmethod
    def of(cls, target: str, tls: Tls, options: Mapping[str, int | str] | None) -> "Channels":
        """Raises OSError if the file of root certificates cannot be read."""
        own = credentials(tls)
        return cls(target, own, Security(own is not None, isinstance(tls, grpc.ChannelCredentials)), options)

    def open(self, options: ChannelOptions) -> grpc.Channel:
        """A channel for threads."""
        merged = self._merged((*options, *unary_streams.OPTIONS))
        if self.credentials is None:
            return grpc.insecure_channel(self.target, merged)
        return grpc.secure_channel(self.target, self.credentials, merged)

    def open_async(self, options: ChannelOptions) -> grpc.aio.Channel:
        """A channel of the running event loop."""
        merged = self._merged(options)
        if self.credentials is None:
            return grpc.aio.insecure_channel(self.target, merged)
        return grpc.aio.secure_channel(self.target, self.credentials, merged)

    def _merged(self, options: ChannelOptions) -> ChannelOptions:
        return tuple((dict(options) | dict(self.options or {})).items())


class Method(NamedTuple, Generic[Q, R]):
    """Path, serialiser and deserialiser of an RPC, in the order of gRPC's constructors."""

    path: str
    serializer: Callable[[Q], bytes]
    deserializer: Callable[[bytes], R]


ENCODE: Method[Request, Frame[pb.EncodeResponse] | Malformed] = Method(
    f"/{SERVICE}/Encode", write_request, partial(read_chunk, pb.EncodeResponse)
)
ENCODE_STREAM: Method[Frame[pb.EncodeStreamRequest], Frame[pb.EncodeStreamResponse] | Malformed] = Method(
    f"/{SERVICE}/EncodeStream", write_chunk, partial(read_chunk, pb.EncodeStreamResponse)
)
GET_MODEL: Method[pb.GetModelRequest, pb.GetModelResponse | Malformed] = Method(
    f"/{SERVICE}/GetModel", pb.GetModelRequest.SerializeToString, partial(read_plain, pb.GetModelResponse)
)


# HealthCheckRequest is one string and HealthCheckResponse one enum, both field 1, as in the wrapper types.
def _health_status(raw: bytes) -> int:
    message = read_plain(Int32Value, raw)
    return 0 if isinstance(message, Malformed) else message.value


HEALTH: Method[str, int] = Method(
    "/grpc.health.v1.Health/Check", lambda service: StringValue(value=service).SerializeToString(), _health_status
)
HEALTH_STATUS = ("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")


def health_name(status: int) -> str:
    return HEALTH_STATUS[status] if 0 <= status < len(HEALTH_STATUS) else "UNKNOWN"


def credentials(tls: Tls) -> grpc.ChannelCredentials | None:
    """Channel credentials; None without TLS. Raises OSError if the file cannot be read."""
    if isinstance(tls, grpc.ChannelCredentials):
        return tls
    if isinstance(tls, str | os.PathLike):
        return grpc.ssl_channel_credentials(Path(tls).read_bytes())
    return grpc.ssl_channel_credentials() if tls else None


def routed_options() -> ChannelOptions:
    """For bulk channels that choose the replica of a call by the hash of its hint."""
    os.environ.setdefault(_RING_HASH_HEADER, "true")
    return _ROUTED_OPTIONS


def checked_target(target: str | None) -> str:
    """The target, with the usual port of servers if it has none; default: the environment variable.

    Raises ValueError if it is missing or invalid.
    """
    if target is None:
        target = os.environ.get(VARIABLE, "")
        if not target:
            raise ValueError(f"no target: pass one, such as 'localhost:{PORT}', or set {VARIABLE}")
    scheme, _, rest = target.partition(":")
    if scheme in ("http", "https"):
        raise ValueError(f"target {target!r} is a URL; {_FORMS}")
    if scheme in ("ipv4", "ipv6"):
        return f"{scheme}:{','.join(_checked_address(target, scheme, address) for address in rest.split(','))}"
    if scheme == "dns":
        authority, slash, name = rest.rpartition("/") if rest.startswith("//") else ("", "", rest)
        return f"dns:{authority}{slash}{_checked_name(target, name)}"
    if scheme in ("unix", "unix-abstract", "vsock", "xds") or rest.startswith("/"):
        return target
    return _checked_name(target, target)


def _checked_address(target: str, scheme: str, address: str) -> str:
    host, port = _divided(address)
    if not (_is(IPv4Address, host) if scheme == "ipv4" else _is_ipv6(host)):
        wrong = f"{host!r} is not an {scheme} address; for a name use dns:///name:port"
        raise ValueError(f"target {target!r}: {wrong}")
    return _with_port(target, host, port)


def _checked_name(target: str, address: str) -> str:
    host, port = _divided(address)
    if not host:
        raise ValueError(f"target {target!r} has no host; {_FORMS}")
    if not set("[]:").isdisjoint(host) and not _is_ipv6(host):
        raise ValueError(f"target {target!r}: {host!r} is neither a name nor an IPv6 address in brackets")
    return _with_port(target, host, port)


def _divided(address: str) -> tuple[str, str | None]:
    """Host and port. By gRPC's rules an IPv6 address without brackets has no port; it gets brackets."""
    if _is_ipv6(f"[{address}]"):
        return f"[{address}]", None
    host, colon, port = address.rpartition(":")
    return (host, port) if colon and not port.endswith("]") else (address, None)


def _is(kind: type[IPv4Address | IPv6Address], host: str) -> bool:
    with suppress(ValueError):
        return bool(kind(host))
    return False


def _is_ipv6(host: str) -> bool:
    """True for an IPv6 address in brackets."""
    return host[:1] + host[-1:] == "[]" and _is(IPv6Address, host[1:-1])


def _with_port(target: str, host: str, port: str | None) -> str:
    if port is None:
        return f"{host}:{PORT}"
    if not (port.isascii() and port.isdigit() and 1 <= int(port) <= _MAX_PORT):
        raise ValueError(f"target {target!r}: {port!r} is not a port between 1 and {_MAX_PORT}")
    return f"{host}:{port}"
