"""A stand-in for the HTTP server of an LLM engine, run as a process: it records requests and answers as they ask it to.

The answer to a chat completion is chosen by its model: `slow` sends its first event, and the others once the test posts
to /test/continue; `status-429` and the like fail; `broken` and `broken-stream` cut the connection; `silent` sends
nothing, `flood` without end.
`rows-from-HOST:PORT` fetches the embeddings of references from a Vitwire server, as the
EC connector does, and fails without them: with status 500, or with an event. `late-rows-from-` asks for the others once
the last one is there.
"""

import asyncio
import json
import sys
from collections.abc import AsyncGenerator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from vitwire import AsyncClient, Item, VitwireError

_FETCH_SECONDS = 10.0
_EMBEDS = ("image_embeds", "video_embeds")
WORDS = ["Two", " cats", " on", " a", " sofa"]
USAGE = {"prompt_tokens": 20, "completion_tokens": 5, "total_tokens": 25}


class Engine:
    """What the process has seen, and the events that tests set."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.proceed = asyncio.Event()
        self.cancelled = 0
        self.is_ready = True

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        self._record(request, body)
        model = body.get("model", "")
        fetched = asyncio.create_task(_fetch(model.partition("rows-from-")[2], body, late=model.startswith("late-")))
        if not body.get("stream") and not await fetched:
            model = "status-500"
        if model.startswith("status-"):
            status = int(model.removeprefix("status-"))
            error = {"message": f"the engine says {status}", "type": "engine", "param": None, "code": status}
            return JSONResponse({"error": error}, status, headers={"retry-after": "7"})
        if odd := self._odd(model):
            return odd
        if model == "silent":
            await self._until_cancelled()
        if body.get("stream"):
            return StreamingResponse(self._events(model, fetched), media_type="text/event-stream")
        message = {"role": "assistant", "content": "".join(WORDS)}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return JSONResponse(_completion("chat.completion", choice), headers={"x-engine": "stand-in"})

    def _odd(self, model: str) -> Response | None:
        """An answer in another form than usual."""
        if model == "broken":
            return _Broken(b'{"id": "chatcmpl-1", "choi', "application/json")
        if model == "broken-stream":
            return _Broken(_event({"choices": [], "id": "chatcmpl-1", "model": "tiny"}), "text/event-stream")
        if model == "flood":
            return StreamingResponse(self._flood(), media_type="application/octet-stream")
        return None

    async def other(self, request: Request) -> Response:
        body = await request.body()
        self._record(request, body.decode("latin-1"))
        if request.url.path == "/v1/models":
            return JSONResponse({"object": "list", "data": [{"id": "tiny", "object": "model", "created": 1}]})
        return Response(body, media_type=request.headers.get("content-type"))

    async def health(self, _: Request) -> Response:
        return Response(status_code=200 if self.is_ready else 503)

    async def test(self, request: Request) -> Response:
        """/test/requests lists and forgets what was received; the others change the state."""
        match request.path_params["what"]:
            case "continue":
                self.proceed.set()
            case "sick" | "well" as health:
                self.is_ready = health == "well"
            case "requests":
                seen, self.requests = self.requests, []
                return JSONResponse(seen)
        return JSONResponse({"cancelled": self.cancelled})

    def _record(self, request: Request, body: object) -> None:
        url = request.url
        self.requests.append(
            {
                "method": request.method,
                "path": url.path,
                "query": url.query,
                "raw_target": (request.scope["raw_path"] + b"?" + request.scope["query_string"]).decode(),
                "body": body,
                "headers": dict(request.headers),
            }
        )

    async def _events(self, model: str, fetched: asyncio.Task[bool]) -> AsyncGenerator[bytes, None]:
        if not await fetched:
            yield _event({"error": {"message": "no embedding"}})
            return
        for position, word in enumerate(WORDS):
            if model == "slow" and position == 1:
                await self._until_cancelled(self.proceed)
                self.proceed.clear()
            yield _event(_completion("chat.completion.chunk", {"index": 0, "delta": {"content": word}}))
        yield b"data: [DONE]\n\n"

    async def _flood(self) -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield bytes(1 << 20)
                await asyncio.sleep(0)  # sending to a client that left does not wait
        finally:
            self.cancelled += 1

    async def _until_cancelled(self, event: asyncio.Event | None = None) -> None:
        try:
            await (event or asyncio.Event()).wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


class _Broken(Response):
    """Ends before it is complete, and closes the connection."""

    def __init__(self, body: bytes, content_type: str) -> None:
        length = {} if content_type == "text/event-stream" else {"content-length": "100000"}
        super().__init__(body, headers={"content-type": content_type} | length)
        if not length:
            del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})


async def _fetch(target: str, body: dict[str, Any], *, late: bool) -> bool:
    """Whether the embeddings of all references arrived; nothing is fetched without a target."""
    if not target:
        return True
    parts = [part for message in body["messages"] for part in message["content"] if part["type"] in _EMBEDS]
    items = [_item(part["uuid"], part[part["type"]]) for part in parts]
    async with AsyncClient(target, timeout=_FETCH_SECONDS) as client:
        try:
            if late:
                await client.encode(items[-1:])
            return len(await client.encode(items)) == len(items)
        except VitwireError:
            return False


def _item(content_id: str, metadata: dict[str, Any]) -> Item:
    """The embedding that a reference names."""
    if "image_grid_thw" in metadata:
        return Item(None, metadata["image_grid_thw"], content_id=content_id)
    return Item(None, metadata["video_grid_thw"], "video", content_id)


def _event(value: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()


def _completion(kind: str, choice: dict[str, Any]) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "object": kind, "created": 1, "model": "tiny", "choices": [choice], "usage": USAGE}


def main(port: int) -> None:
    """Serve on loopback until a signal."""
    engine = Engine()
    everything = ["GET", "POST", "PUT", "DELETE"]
    routes = [
        Route("/v1/chat/completions", engine.chat, methods=["POST"]),
        Route("/health", engine.health),
        Route("/test/{what}", engine.test, methods=["GET", "POST"]),
        Route("/{path:path}", engine.other, methods=everything),
    ]
    config = uvicorn.Config(Starlette(routes=routes), port=port, http="h11", ws="none", timeout_graceful_shutdown=1)
    uvicorn.Server(config).run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
