"""The way of admitted requests: their images become embeddings, and the engine answers."""

import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from anyio.to_thread import run_sync

from vitwire.shared.fairness.places import Places
from vitwire_gateway.api_errors import ApiError
from vitwire_gateway.bodies import read_body
from vitwire_gateway.embeddings.embedding_answers import Answer, Vectors, vectors_of
from vitwire_gateway.embeddings.embedding_requests import EmbeddingRequest
from vitwire_gateway.gateway_settings import RouterSettings
from vitwire_gateway.metrics import FALLBACKS, Metrics
from vitwire_gateway.requests.caller_fields import clean_body
from vitwire_gateway.requests.content_parts import Errors, Images, size_of
from vitwire_gateway.requests.engine_parts import MakePart, Part, whole_part
from vitwire_gateway.requests.filling import Filled, filled
from vitwire_gateway.requests.image_sources import Limits
from vitwire_gateway.requests.request_reading import CutRequest, cut_request, read
from vitwire_gateway.router.admission import Ticket
from vitwire_gateway.router.embedding_apis import EmbeddingApi
from vitwire_gateway.router.endpoint import Exchange
from vitwire_gateway.router.llm_engine import Engine, forwarded, is_of_events

logger = logging.getLogger("vitwire.router")

_PROXIED = ("/v1", "/tokenize", "/detokenize", "/version", "/pooling", "/classify", "/score", "/rerank")
"""Paths that are passed on, with those under them: the engine's API, not its administration."""
_ENGINES_ALONE = (["v1", "messages"], ["v1", "responses"])
"""Paths that are refused, with those under them: an engine would encode the images of their requests itself."""
_FORMS = "/v1/audio/"
"""Begins the paths whose forms are passed on unread: engines read no content parts there."""
Check = Callable[[bool], Awaitable[None]]
"""Called before a response that may lack images is passed on; with whether it is an error. Raises ApiError."""


@dataclass(frozen=True, slots=True)
class Router:
    """Answers requests with images, and passes others on."""

    settings: RouterSettings
    metrics: Metrics
    engine: Engine
    images: Images
    drops_authorization: bool
    """The caller's key is for the router alone."""
    engine_key: str | None
    """Sent in place of the caller's key."""
    answering: Places = field(default_factory=lambda: Places(1))
    """To write vectors as JSON, which takes 2 ms for 64 KiB."""

    async def chat(self, make: MakePart, exchange: Exchange, ticket: Ticket) -> None:
        """A chat completion, whose images become embeddings."""
        _check_method(exchange, "POST")
        body = await self._body(exchange, ticket)
        await exchange.unless_disconnected(self._completed(make, exchange, ticket, body))

    async def embeddings(self, api: EmbeddingApi, exchange: Exchange, ticket: Ticket) -> None:
        """Embeddings: of images, or the engine's."""
        if api.is_shared and exchange.request.method != "POST":
            await self.proxied(exchange, ticket)
            return
        _check_method(exchange, "POST")
        body = await self._body(exchange, ticket)
        await exchange.unless_disconnected(self._embeddings(api, exchange, ticket, body))

    async def models(self, exchange: Exchange, ticket: Ticket) -> None:
        """The encoder's model, in OpenAI's form: in a list, or by its id."""
        _check_method(exchange, "GET")
        model = await self.images.serving(ticket.caller, exchange.trace, ticket.bytes.take).model()
        found = {"id": model.model_id, "object": "model", "created": 0, "owned_by": "vitwire"}
        wanted = exchange.request.path_params.get("model")
        if wanted not in (None, model.model_id):
            raise ApiError(404, f"the model {wanted!r} does not exist", "model_not_found", "model")
        answer = found if wanted else {"object": "list", "data": [found]}
        await exchange.respond(200, [], json.dumps(answer).encode())

    async def proxied(self, exchange: Exchange, ticket: Ticket) -> None:
        """Any other request: it and its response pass as they are, without what only the router may say."""
        if error := refused_path(exchange.request.scope["path"], has_engine=not self.settings.no_engine):
            raise error
        body = await self._body(exchange, ticket)
        await exchange.unless_disconnected(self._passed(exchange, ticket, body))

    async def _passed(self, exchange: Exchange, ticket: Ticket, body: bytes) -> None:
        """Forward a request that the router does not answer; it passes only if it can be inspected. Raises ApiError."""
        request, is_new = exchange.request, False
        if request.headers.get("content-type", "").lower().startswith(("multipart/", "application/x-www-form")):
            if not request.scope["path"].startswith(_FORMS):
                raise ApiError(415, "forms are not supported here, send JSON", "unsupported_form")
        elif pieces := await self._read(clean_body, exchange, ticket, body):
            body, is_new = bytes(pieces[0]), True
            ticket.bytes.take(len(body))
        await self._forward(exchange, body, as_json=is_new)

    async def _body(self, exchange: Exchange, ticket: Ticket) -> bytes:
        settings = self.settings
        if not {"identity"}.issuperset(exchange.request.headers.getlist("content-encoding")):
            raise ApiError(415, "a compressed body is not supported", "unsupported_encoding")
        with self._timed("receive"):
            body = await read_body(exchange.request, ticket.bytes, settings, settings.body_seconds)
        ticket.place.take(1)
        return body

    async def _read(self, job: Callable[..., Any], exchange: Exchange, ticket: Ticket, body: bytes) -> Any:  # noqa: ANN401  # as the job returned it
        """As `request_reading.read`."""
        exchange.stage = "images"
        settings, workers = self.settings, self.images.encoder.workers
        limits = Limits(settings.max_images, settings.max_image_bytes, settings.allow_caller_embeds)
        return await read(workers, ticket.caller, job, body, limits)

    async def _completed(self, make: MakePart, exchange: Exchange, ticket: Ticket, body: bytes) -> None:
        job = partial(cut_request, with_clips=self.settings.clips == "encode")
        request = CutRequest.of(await self._read(job, exchange, ticket, body))
        exchange.images = len(request.images.places)
        if request.images.places:
            images = self.images.serving(ticket.caller, exchange.trace, ticket.bytes.take)
            await self._encoded(make, exchange, ticket, images, request)
            return
        if request.pieces:  # cleaned
            body = b"".join(request.pieces)
            ticket.bytes.take(len(body))
        await self._forward(exchange, body, as_json=True)

    async def _embeddings(self, api: EmbeddingApi, exchange: Exchange, ticket: Ticket, body: bytes) -> None:
        found = await self._read(api.read, exchange, ticket, body)
        if found is None:
            await self._passed(exchange, ticket, body)
            return
        request = EmbeddingRequest.of(found)
        exchange.images = len(request.images.places)
        images = self.images.serving(ticket.caller, exchange.trace, ticket.bytes.take)
        with self._timed("images"):
            model = await images.model()
            api.check(request.options, model)
            errors: Errors = {}
            kept = errors if request.options.by_item else None
            loaded = await images.load(request.images, kept)
            encoded = await images.encoded(loaded, kept)
            if any(each.model.weights_fingerprint != model.weights_fingerprint for each in encoded.values()):
                raise ApiError(503, "the encoder changed its model during the request", "encoder_unavailable")
            vectors = {
                digest: await run_sync(vectors_of, each.embedding, each.model, request.options)
                for digest, each in encoded.items()
            }
        results: list[Vectors | ApiError] = []
        for place, digest in zip(request.images.places, loaded.order, strict=True):
            error = errors.get(place.source) or errors.get(digest)
            results.append(error.at(place.param) if error else vectors[digest])
        answer = Answer(request.options, model, results, exchange.request_id)
        limit = self.settings.max_buffered_bytes
        if (size := sum(each.rows.nbytes for each in answer.vectors)) > limit:  # equal images are held once
            raise ApiError(413, f"the vectors have {size} bytes, the limit is {limit}", "request_too_large")
        await exchange.respond_in_chunks(api.answer(answer), lambda: self.answering.place(ticket.caller.path))

    async def _encoded(
        self, make: MakePart, exchange: Exchange, ticket: Ticket, images: Images, request: CutRequest
    ) -> None:
        async def forward(parts: Sequence[Part], ids: Sequence[str] = (), check: Check | None = None) -> None:
            limit = self.settings.max_buffered_bytes
            if (needed := sum(map(size_of, parts))) > limit:  # equal images are held once, and sent in each place
                text = f"the engine would get {needed} bytes for the images of this request, the limit is {limit}"
                raise ApiError(413, text, "request_too_large")
            body = await run_sync(filled, request.pieces, parts, ids)
            ticket.bytes.take(body.held)
            await self._forward(exchange, body, as_json=True, check=check)

        try:
            async with images.encoder.storing():
                with self._timed("images"):
                    loaded = await images.load(request.images)
                    async with images.in_time(loaded):
                        parts = await images.parts(loaded, make)
                # vLLM replaces the uuids of parts if it has options of media.
                ids = [part["uuid"] for part in parts] if self.settings.mode == "reference" else []
                await forward(parts, ids, lambda failed: images.check_stored(loaded, still=failed))
                return
        except ApiError as error:  # of the encoder only before the response has begun
            reason = error.code.removeprefix("encoder_")
            if self.settings.on_encoder_failure == "error" or reason == error.code or reason not in FALLBACKS:
                raise
            logger.warning("request %s: the engine encodes the images: %s", exchange.request_id, error)
            self.metrics.fallbacks.labels(reason).inc()
        exchange.stage = "images"
        await forward(await images.parts(loaded, whole_part))

    async def _forward(
        self,
        exchange: Exchange,
        body: bytes | Filled,
        *,
        as_json: bool = False,
        check: Check | None = None,
    ) -> None:
        """Send the request to the engine, and its response to the caller."""
        exchange.stage = "engine"
        request = exchange.request
        changed: dict[bytes, bytes | None] = {b"x-request-id": exchange.request_id.encode()}
        kind = request.headers.get("content-type")  # of several, the one by which the body was read
        changed[b"content-type"] = b"application/json" if as_json else kind.encode("latin-1") if kind else None
        if self.engine_key or self.drops_authorization:
            changed[b"authorization"] = f"Bearer {self.engine_key}".encode() if self.engine_key else None
        headers = forwarded(request.headers.raw, without=changed)
        headers += [(name, value) for name, value in changed.items() if value is not None]
        began = time.perf_counter()
        async with self.engine.send(request.method, exchange.target, headers, body) as response:
            has_failed = response.status_code >= 500
            if check and (has_failed or is_of_events(response)):
                await check(has_failed)
            self.metrics.seconds.labels("engine").observe(time.perf_counter() - began)
            await exchange.relay(response)

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.metrics.seconds.labels(stage).observe(time.perf_counter() - began)


def refused_path(path: str, *, has_engine: bool) -> ApiError | None:
    """The error for a path that is not passed on to an engine."""
    if [each for each in path.split("/") if each][:2] in _ENGINES_ALONE:
        text = (
            "the router serves chat completions and embeddings; vLLM's own server takes messages and responses, with "
            "images for the encoder (docs/vllm.md)"
        )
        return ApiError(404, text, "unsupported_api")
    first, second, *_ = parts = [*path[1:].split("/"), ""]
    is_doubled = first == "v1" and second in ("v1", "v2")
    is_engines = any(path == each or path.startswith(f"{each}/") for each in _PROXIED)
    is_engines = is_engines and not is_doubled and {".", ".."}.isdisjoint(parts)
    if is_engines and has_engine:
        return None
    needs = is_engines and "embed" not in path
    text = f"{path} needs an engine, and there is none here" if needs else f"there is no path {path}"
    if not has_engine:
        text += ", only /v1/embeddings (base URL with /v1), /v2/embed (base URL without /v1) and /v1/models"
    elif is_doubled:
        text += ": the client's base URL has one /v1 too many"
    return ApiError(404, text, "no_engine" if needs else "unknown_path")


def _check_method(exchange: Exchange, method: str) -> None:
    """Raises ApiError for another method."""
    if exchange.request.method != method:
        raise ApiError(405, f"expected {method}", "method_not_allowed", headers={"allow": method})
