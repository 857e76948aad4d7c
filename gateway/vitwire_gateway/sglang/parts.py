"""What SGLang's receivers ask an encoder for: parts of a request, and where their embeddings go. Pure."""

import re
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from smg_grpc_proto import sglang_encoder_pb2 as pb

_ADDRESS = re.compile(
    r"(?:\[(?P<v6>[0-9A-Fa-f:.]{2,45})\]|(?P<host>[A-Za-z0-9](?:[A-Za-z0-9._-]{0,252})?)):(?P<port>[0-9]{1,5})"
)
_MAX_ID = 512
_MAX_PARTS = 1024
_MAX_SOURCES = 4096
_MAX_RECEIVERS = 64
"""SGLang has one for each tensor parallel rank."""
_NEUTRAL_OPTIONS = frozenset({"url", "content_hash", "detail"})
"""Keys of an image that do not change its pixels in models with grids."""


class Refused(Exception):
    """A request that cannot be served, with the HTTP status that SGLang's receiver passes on to its user."""

    def __init__(self, message: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Part:
    """Images of one request that this encoder is to encode; other encoders get the other parts."""

    req_id: str
    num_parts: int
    part_idx: int
    sources: tuple[str, ...]
    """The images: `data:` URIs, base64, URLs or paths."""
    receivers: tuple[str, ...]
    """Where the embedding goes, as ZMQ endpoints; empty if SGLang's schedulers register themselves."""

    def __post_init__(self) -> None:
        if not 0 < len(self.req_id) <= _MAX_ID:
            raise Refused(f"req_id: expected 1 to {_MAX_ID} characters, got {len(self.req_id)}")
        if not 0 < self.num_parts <= _MAX_PARTS:
            raise Refused(f"num_parts: expected 1 to {_MAX_PARTS}, got {self.num_parts}")
        if not 0 <= self.part_idx < self.num_parts:
            raise Refused(f"part_idx: expected 0 to {self.num_parts - 1}, got {self.part_idx}")
        if not self.sources:
            raise Refused("mm_items: expected at least one image, got none")


@dataclass(frozen=True, slots=True)
class Registration:
    """A scheduler's address for a request; `count` schedulers (tensor parallel ranks) will register."""

    req_id: str
    receiver: str
    count: int

    def __post_init__(self) -> None:
        if not 0 < len(self.req_id) <= _MAX_ID:
            raise Refused(f"req_id: expected 1 to {_MAX_ID} characters, got {len(self.req_id)}")
        if not 0 < self.count <= _MAX_RECEIVERS:
            raise Refused(f"receive_count: expected 1 to {_MAX_RECEIVERS}, got {self.count}")


def part_of_message(message: pb.EncodeRequest) -> Part:
    """The part that a gRPC request asks for. Raises Refused."""
    _check_number(message.mm_items, "mm_items", _MAX_SOURCES)
    _check_number(message.embedding_port, "embedding_port", _MAX_RECEIVERS)
    ports = [port for port in message.embedding_port if port]
    return Part(
        message.req_id,
        message.num_parts,
        message.part_idx,
        tuple(message.mm_items),
        _receivers(message.prefill_host, ports),
    )


def registration_of_message(message: pb.SchedulerReceiveUrlRequest) -> Registration:
    """The registration in a gRPC request. Raises Refused."""
    return Registration(message.req_id, endpoint(message.receive_url, "receive_url"), message.receive_count)


def part_of_json(body: Mapping[str, Any]) -> Part:
    """The part that the JSON of `/encode` asks for. Raises Refused."""
    modality = _text(body, "modality")
    if modality.upper() != "IMAGE":
        raise Refused(f"modality: this encoder takes images only, got {modality[:32]!r}")
    items = body.get("mm_items")
    items = items if isinstance(items, list) else [items]
    ports = body.get("embedding_port")
    ports = ports if isinstance(ports, list) else [] if ports is None else [ports]
    _check_number(items, "mm_items", _MAX_SOURCES)
    _check_number(ports, "embedding_port", _MAX_RECEIVERS)
    if not all(_is_int(port) for port in ports):
        raise Refused("embedding_port: expected a port or a list of ports")
    return Part(
        _text(body, "req_id"),
        _int(body, "num_parts"),
        _int(body, "part_idx"),
        tuple(_source(item, index) for index, item in enumerate(items)),
        _receivers(_text(body, "prefill_host"), ports) if ports else (),
    )


def registration_of_json(body: Mapping[str, Any]) -> Registration:
    """The registration in the JSON of `/scheduler_receive_url`. Raises Refused."""
    receiver = endpoint(_text(body, "receive_url"), "receive_url")
    return Registration(_text(body, "req_id"), receiver, _int(body, "receive_count"))


def endpoint(address: str, field: str) -> str:
    """The ZMQ endpoint of `host:port` or `[IPv6]:port`. Raises Refused; only TCP can be named."""
    found = _ADDRESS.fullmatch(address)
    if not found or not 0 < int(found["port"]) < 1 << 16:
        raise Refused(f"{field}: expected host:port, got {address[:64]!r}")
    return f"tcp://{address}"


def _receivers(host: str, ports: Sequence[int]) -> tuple[str, ...]:
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return tuple(endpoint(f"{host}:{port}", "prefill_host and embedding_port") for port in ports)


def _check_number(values: Sized, field: str, most: int) -> None:
    if len(values) > most:
        raise Refused(f"{field}: {len(values)} values exceed the limit of {most}")


def _source(item: object, index: int) -> str:
    if isinstance(item, dict):
        unknown = sorted(str(key)[:32] for key in item.keys() - _NEUTRAL_OPTIONS)
        if unknown:
            raise Refused(f"mm_items[{index}]: this encoder has no per-image options, got {', '.join(unknown[:8])}")
        item = item.get("url")
    if not isinstance(item, str):
        raise Refused(f"mm_items[{index}]: expected a URL or base64, got {type(item).__name__}")
    return item


def _text(body: Mapping[str, Any], key: str) -> str:
    value = body.get(key)
    if not isinstance(value, str):
        raise Refused(f"{key}: expected a string, got {type(value).__name__}")
    return value


def _int(body: Mapping[str, Any], key: str) -> int:
    value = body.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise Refused(f"{key}: expected an integer, got {type(value).__name__}")
    return value


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
