"""Requests of SGLang's receivers: parts of images or clips to encode, and addresses for their embeddings.

Small requests are read where they are, the rest in a worker.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeGuard

from vitwire.items import Modality
from vitwire_gateway.api_errors import ApiError
from vitwire_gateway.bodies import Json, is_small, parse
from vitwire_gateway.callers import Caller
from vitwire_gateway.workers import Workers

Kind = Literal["part", "registration", "other"]

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
_MODALITIES: dict[str, Modality] = {"IMAGE": "image", "VIDEO": "video"}
_MARGIN = 1 << 20
_MAX_ECHO = 1024
"""Characters of an id that is too long, in errors."""


@dataclass(frozen=True, slots=True)
class Part:
    """Images or clips of one request that this encoder is to encode; other encoders get the other parts."""

    req_id: str
    num_parts: int
    part_idx: int
    sources: tuple[str, ...]
    """The files: `data:` URIs, base64 or URLs."""
    receivers: tuple[str, ...]
    """ZMQ endpoints that the embedding goes to; empty if SGLang's schedulers register themselves."""
    modality: Modality = "image"

    def __post_init__(self) -> None:
        _check("req_id", len(self.req_id), 1, _MAX_ID, " characters")
        _check("num_parts", self.num_parts, 1, _MAX_PARTS)
        _check("part_idx", self.part_idx, 0, self.num_parts - 1)
        if not self.sources:
            raise refused("mm_items: expected at least one image or clip, got none")


@dataclass(frozen=True, slots=True)
class Registration:
    """A scheduler's address for a request; `count` schedulers (tensor parallel ranks) will register."""

    req_id: str
    receiver: str
    count: int

    def __post_init__(self) -> None:
        _check("req_id", len(self.req_id), 1, _MAX_ID, " characters")
        _check("receive_count", self.count, 1, _MAX_RECEIVERS)


class ReceiverRequest(NamedTuple):
    """A request: its id, if that could be read, and what it asks for, if it is not refused."""

    req_id: str | None
    asked: Part | Registration | None = None
    refusal: ApiError | None = None


def refused(message: str, status: int = 400) -> ApiError:
    """A request that cannot be served, with the HTTP status that SGLang's receiver passes on to its user."""
    return ApiError(status, message)


async def read(workers: Workers, caller: Caller, body: bytes, kind: Kind) -> ReceiverRequest:
    """The request in a body. Raises ApiError if no worker is left or reading takes too much."""
    if is_small(body):
        return receiver_request_of(body, kind)
    req_id, asked, refusal = await workers.run(caller, _read, body, 2 * len(body) + _MARGIN, kind)
    if asked and kind == "part":
        part_id, num_parts, part_idx, files, receivers, modality = asked
        sources = tuple(each.decode("utf-8", "surrogatepass") for each in files)
        return ReceiverRequest(req_id, Part(part_id, num_parts, part_idx, sources, tuple(receivers), modality))
    return ReceiverRequest(req_id, Registration(*asked) if asked else None, refusal)


def _read(body: bytes, kind: Kind) -> Sequence[object]:
    """The job of `read`: fields in place of classes, and the files, which may be large, as bytes."""
    req_id, asked, refusal = receiver_request_of(body, kind)
    fields: Sequence[object] = ()
    if isinstance(asked, Part):
        files = [each.encode("utf-8", "surrogatepass") for each in asked.sources]
        fields = asked.req_id, asked.num_parts, asked.part_idx, files, asked.receivers, asked.modality
    elif asked:
        fields = asked.req_id, asked.receiver, asked.count
    return req_id and req_id[:_MAX_ECHO], fields, refusal


def receiver_request_of(body: bytes, kind: Kind) -> ReceiverRequest:
    """The request in a body."""
    req_id = None
    try:
        content = parse(body)
        req_id = content["req_id"] if isinstance(content.get("req_id"), str) else None
        if kind == "part":
            return ReceiverRequest(req_id, part_of_json(content))
        return ReceiverRequest(req_id, registration_of_json(content) if kind == "registration" else None)
    except ApiError as error:
        return ReceiverRequest(req_id, refusal=error)


def part_of_json(body: Json) -> Part:
    """The part that the JSON of `/encode` asks for. Raises ApiError."""
    modality = _text(body, "modality")
    if modality.upper() not in _MODALITIES:
        raise refused(f"modality: this encoder takes images and clips only, got {modality[:32]!r}")
    items = body.get("mm_items")
    items = items if isinstance(items, list) else [items]
    ports = body.get("embedding_port")
    ports = ports if isinstance(ports, list) else [] if ports is None else [ports]
    _check_number(items, "mm_items", _MAX_SOURCES)
    _check_number(ports, "embedding_port", _MAX_RECEIVERS)
    if not all(_is_int(port) for port in ports):
        raise refused("embedding_port: expected a port or a list of ports")
    return Part(
        _text(body, "req_id"),
        _int(body, "num_parts"),
        _int(body, "part_idx"),
        tuple(_source(item, index) for index, item in enumerate(items)),
        _receivers(_text(body, "prefill_host"), ports) if ports else (),
        _MODALITIES[modality.upper()],
    )


def registration_of_json(body: Json) -> Registration:
    """The registration in the JSON of `/scheduler_receive_url`. Raises ApiError."""
    receiver = endpoint(_text(body, "receive_url"), "receive_url")
    return Registration(_text(body, "req_id"), receiver, _int(body, "receive_count"))


def endpoint(address: str, field: str) -> str:
    """The ZMQ endpoint of `host:port` or `[IPv6]:port`. Raises ApiError; only TCP can be named."""
    found = _ADDRESS.fullmatch(address)
    if not found or not 0 < int(found["port"]) < 1 << 16:
        raise refused(f"{field}: expected host:port, got {address[:64]!r}")
    return f"tcp://{address}"


def _receivers(host: str, ports: Sequence[int]) -> tuple[str, ...]:
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return tuple(endpoint(f"{host}:{port}", "prefill_host and embedding_port") for port in ports)


def _check(field: str, value: int, least: int, most: int, unit: str = "") -> None:
    if not least <= value <= most:
        raise refused(f"{field}: expected {least} to {most}{unit}, got {value}")


def _check_number(values: Sequence[object], field: str, most: int) -> None:
    if len(values) > most:
        raise refused(f"{field}: {len(values)} values exceed the limit of {most}")


def _source(item: object, index: int) -> str:
    if isinstance(item, dict):
        unknown = sorted(str(key)[:32] for key in item.keys() - _NEUTRAL_OPTIONS)
        if unknown:
            raise refused(f"mm_items[{index}]: this encoder has no per-image options, got {', '.join(unknown[:8])}")
        item = item.get("url")
    if not isinstance(item, str):
        raise refused(f"mm_items[{index}]: expected a URL or base64, got {type(item).__name__}")
    return item


def _text(body: Json, key: str) -> str:
    value = body.get(key)
    if not isinstance(value, str):
        raise refused(f"{key}: expected a string, got {type(value).__name__}")
    return value


def _int(body: Json, key: str) -> int:
    value = body.get(key)
    if not _is_int(value):
        raise refused(f"{key}: expected an integer, got {type(value).__name__}")
    return value


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
