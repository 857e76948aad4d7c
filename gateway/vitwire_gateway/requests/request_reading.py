"""Requests from bodies of JSON, with the images and clips in them.

Small requests are read where they are, the rest in a worker.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

from vitwire.wire import Buffer
from vitwire_gateway.bodies import is_small
from vitwire_gateway.callers import Caller
from vitwire_gateway.requests.caller_fields import cleaned
from vitwire_gateway.requests.chat import images_of
from vitwire_gateway.requests.filling import cut, serialised
from vitwire_gateway.requests.image_refs import options_of
from vitwire_gateway.requests.image_sources import Limits, RequestImages, images_in
from vitwire_gateway.workers import Workers

_LONGER_BYTES = 32 << 20
"""JSON in ASCII takes three times the bytes of UTF-8 at most, JSON in its strings a little more, and numbers are
written out: 1e15 has 18 characters."""


class CutRequest(NamedTuple):
    """A request that has been read, for an engine."""

    pieces: Sequence[Buffer]
    """Its JSON, cut for `filled`; without images in one piece, or empty if the engine gets the body as it is."""
    images: RequestImages

    @classmethod
    def of(cls, answer: Sequence[Any]) -> Self:
        """The request as a worker sends it."""
        pieces, images = answer
        return cls(pieces, RequestImages.of(images))


async def read(workers: Workers, caller: Caller, job: Callable[..., Any], body: bytes, limits: Limits) -> Any:  # noqa: ANN401  # as the job returned it
    """`job(body, limits)`, as `Workers.run`, but here if the body is small. Raises ApiError."""
    if is_small(body):
        return job(body, limits)
    return await workers.run(caller, job, body, 4 * len(body) + _LONGER_BYTES, limits)


def cut_request(body: bytes, limits: Limits, *, with_clips: bool) -> CutRequest:
    """The chat request in a body. Clips are perhaps the engine's. Raises ApiError."""
    request, is_new = cleaned(body, limits)
    found = images_of(request, with_clips=with_clips)
    images = images_in(found, limits)
    if any(each.modality == "image" for each in found):
        images = images._replace(options=options_of(request))
    if not found:
        return CutRequest([serialised(request)] if is_new else [], images)
    return CutRequest(cut(request, found), images)
