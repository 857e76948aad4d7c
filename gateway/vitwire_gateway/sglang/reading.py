"""Requests of SGLang's receivers, read where they are if they are small, else in a worker."""

from collections.abc import Sequence
from dataclasses import asdict
from http import HTTPStatus
from typing import Any, Literal, NamedTuple, TypeVar

from google.protobuf.message import DecodeError, Message
from smg_grpc_proto import sglang_encoder_pb2 as pb

from vitwire.wire import Buffer
from vitwire_gateway.openai import reading
from vitwire_gateway.openai.errors import ApiError
from vitwire_gateway.openai.rewriting import parse
from vitwire_gateway.openai.shares import Caller
from vitwire_gateway.openai.workers import Workers
from vitwire_gateway.sglang.parts import (
    Part,
    Refused,
    Registration,
    part_of_json,
    part_of_message,
    registration_of_json,
    registration_of_message,
)

M = TypeVar("M", bound=Message)
Form = Literal["json", "message"]
Kind = Literal["part", "registration", "other"]

_SMALL_BYTES = 64 << 10
_MARGIN = 1 << 20
_MAX_ECHO = 1024
"""Characters of an id that is too long, in errors."""


class Posted(NamedTuple):
    """A request: its id, if that could be read, and what it asks for, if it is not refused."""

    req_id: str | None
    part: Part | None = None
    registration: Registration | None = None
    refusal: Refused | None = None


async def read(workers: Workers, caller: Caller, body: bytes, form: Form, kind: Kind) -> Posted:
    """The request in a body. Raises Refused if no worker is left or reading takes too much."""
    if len(body) <= _SMALL_BYTES:
        return posted_of(body, form, kind)
    try:
        answer = await workers.run(caller, "post", {"form": form, "kind": kind}, [body], 2 * len(body) + _MARGIN)
    except ApiError as error:
        raise Refused(error.message, HTTPStatus(error.status)) from error
    head = answer.head
    if refusal := head["refusal"]:
        return Posted(head["req_id"], refusal=Refused(refusal["message"], HTTPStatus(refusal["status"])))
    if part := head["part"]:
        sources = tuple(blob.decode("utf-8", "surrogatepass") for blob in answer.blobs)
        return Posted(head["req_id"], Part(**part | {"sources": sources, "receivers": tuple(part["receivers"])}))
    registration = head["registration"]
    return Posted(head["req_id"], registration=Registration(**registration) if registration else None)


def posted_of(body: bytes, form: Form, kind: Kind) -> Posted:
    """The request in a body."""
    req_id = None
    try:
        if form == "message":
            if kind == "part":
                return Posted(None, part_of_message(_parsed(pb.EncodeRequest(), body)))
            return Posted(None, registration=registration_of_message(_parsed(pb.SchedulerReceiveUrlRequest(), body)))
        content = _object(body)
        req_id = content["req_id"] if isinstance(content.get("req_id"), str) else None
        if kind == "part":
            return Posted(req_id, part_of_json(content))
        return Posted(req_id, registration=registration_of_json(content) if kind == "registration" else None)
    except Refused as error:
        return Posted(req_id, refusal=error)


def _object(body: bytes) -> dict[str, Any]:
    try:
        return parse(body)
    except ApiError as error:
        raise Refused(error.message, HTTPStatus(error.status)) from error


def _parsed(message: M, body: bytes) -> M:
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise Refused(f"the request is no {message.DESCRIPTOR.name}") from error
    return message


def _read_post(*, form: Form, kind: Kind, blobs: list[bytes]) -> tuple[dict[str, Any], Sequence[Buffer]]:
    posted = posted_of(blobs[0], form, kind)
    sources = posted.part.sources if posted.part else ()
    refusal = posted.refusal
    head = {
        "req_id": posted.req_id and posted.req_id[:_MAX_ECHO],
        "part": posted.part and asdict(posted.part) | {"sources": None},
        "registration": posted.registration and asdict(posted.registration),
        "refusal": refusal and {"message": str(refusal), "status": refusal.status},
    }
    return head, [source.encode("utf-8", "surrogatepass") for source in sources]


JOBS = {**reading.JOBS, "post": _read_post}
