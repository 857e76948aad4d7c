"""What both clients hand to gRPC: options, credentials, metadata, methods and health messages."""

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar
from uuid import uuid4

import grpc
from google.protobuf.wrappers_pb2 import Int32Value, StringValue

from vitwire._retry import KEEPALIVE_SECONDS, KEEPALIVE_TIMEOUT
from vitwire.v1 import encoder_pb2 as pb
from vitwire.wire import Frame, Malformed, Request, read_chunk, read_plain, write_chunk, write_request

Q = TypeVar("Q")
R = TypeVar("R")
Tls = bool | str | os.PathLike[str] | grpc.ChannelCredentials | None
Metadata = tuple[tuple[str, str], ...]
ChannelOptions = tuple[tuple[str, int | str], ...]

SERVICE = "vitwire.v1.EncoderService"

REASON_SECONDS = 1.0
"""How long to ask why no server is ready."""
ACKNOWLEDGE = "x-vitwire-acknowledge"
"""Asks the server for its headers as soon as it accepts a call. Proxies repeat no call whose headers they passed on, so
only a client that repeats calls by itself asks for it."""
_BALANCED: dict[str, object] = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "healthCheckConfig": {"serviceName": SERVICE},
}
_COMMON_OPTIONS: ChannelOptions = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # gRPC repeats nothing, neither by a policy nor transparently: where 1.85 does, RPCs whose servers are all gone hang
    # beyond their deadline, and client streams lose messages. `_retry.Attempts` says when the client sends again.
    ("grpc.enable_retries", 0),
    # A server that returns is reached within half a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 400),
    # This is how long an attempt to connect may take: a frozen server accepts, and then says nothing.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    # Finds a frozen or vanished server within 20 s. Pings are sent while a call is open, and the health watch of each
    # connection always is. Otherwise gRPC stops after two pings without data.
    ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT * 1000),
    ("grpc.http2.max_pings_without_data", 0),
    # Names are resolved again as soon as a connection ends, not 30 s after the last time: replicas come and go.
    ("grpc.dns_min_time_between_resolutions_ms", 2_000),
    # gRPC 1.85 waits a minute for the answer to any ping if this does not say otherwise.
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT * 1000),
)
OPTIONS: ChannelOptions = (*_COMMON_OPTIONS, ("grpc.service_config", json.dumps(_BALANCED)))
# Streams have connections of their own, to keep bulk off that of small requests.
STREAM_OPTIONS: ChannelOptions = (*OPTIONS, ("grpc.use_local_subchannel_pool", 1))
HEALTH_OPTIONS = _COMMON_OPTIONS
"""No health checking here: such a channel hides the servers whose ill health is asked for."""


class Method(NamedTuple, Generic[Q, R]):
    """Path of an RPC and how its messages are written and read; the order grpc's constructors take."""

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


# HealthCheckRequest is one string and HealthCheckResponse one enum, both of number 1, as in the wrappers.
def _health_request(service: str) -> bytes:
    return StringValue(value=service).SerializeToString()


def _health_status(raw: bytes) -> int:
    message = read_plain(Int32Value, raw)
    return 0 if isinstance(message, Malformed) else message.value


HEALTH: Method[str, int] = Method("/grpc.health.v1.Health/Check", _health_request, _health_status)
HEALTH_STATUS = ("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")


def health_name(status: int) -> str:
    return HEALTH_STATUS[status] if 0 <= status < len(HEALTH_STATUS) else "UNKNOWN"


def credentials(tls: Tls) -> grpc.ChannelCredentials | None:
    """None for a channel without TLS. Raises OSError where a file of root certificates cannot be read."""
    if isinstance(tls, grpc.ChannelCredentials):
        return tls
    if isinstance(tls, str | os.PathLike):
        return grpc.ssl_channel_credentials(Path(tls).read_bytes())
    return grpc.ssl_channel_credentials() if tls else None


def bearer(token: str | None) -> str | None:
    """The token, if a header can carry it. Raises ValueError, which does not tell the token."""
    if token and not (token.isascii() and token.isprintable()):
        raise ValueError("the token has characters other than printable ASCII, such as a line's end")
    return token


def metadata(token: str | None) -> Metadata:
    """Metadata of one call; the server logs the request id with what goes wrong on its side."""
    pairs = [("x-request-id", uuid4().hex), (ACKNOWLEDGE, "1"), *_trace_context()]
    return (*pairs, ("authorization", f"Bearer {token}")) if token else tuple(pairs)


def _trace_context() -> Metadata:
    """The caller's span in W3C form, where the program uses OpenTelemetry, which is not asked for here."""
    if "opentelemetry.trace" not in sys.modules:
        return ()
    from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415  # there, but for others' sake
        TraceContextTextMapPropagator,
    )

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return tuple(carrier.items())
