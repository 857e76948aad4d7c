"""Requests with photographs as files, by HTTP: to vLLM, or to a router that has them encoded."""

import asyncio
import base64
import io
import json
import random
import string
import time
from dataclasses import dataclass
from typing import Any

from bench.engine.answers import Answer
from bench.engine.checkpoint import SPECIAL
from bench.engine.requests import Asked

MODEL = "bench"
"""The name of the model in requests."""
_QUALITY = 90
_LIMIT = 1 << 24
"""Bytes of one event."""
_SECONDS = 120
"""For a whole request: one that nobody answers counts as an error, and does not end the run."""


@dataclass(slots=True)
class Photos:
    """A route of requests to an HTTP server; `session` is aiohttp's."""

    url: str
    session: Any

    async def prepare(self, asked: Asked, name: str) -> bytes:
        """The body of the request, with each picture as a JPEG in a data URL."""
        return await asyncio.to_thread(_body, asked, name)

    async def answered(self, asked: Asked, ready: bytes, name: str, tokens: int) -> Answer:  # noqa: ARG002  # as Route
        """The request, `tokens` long; failures of any of the servers are noted."""
        from aiohttp import ClientError  # noqa: PLC0415 - comes with vLLM

        answer = Answer(start=time.monotonic())
        body = ready.replace(b'"max_tokens": 0', b'"max_tokens": %d' % tokens)
        try:
            address = f"{self.url}/v1/chat/completions"
            async with self.session.post(address, data=body, headers={"content-type": "application/json"}) as response:
                if response.status != 200:
                    answer.error = f"HTTP {response.status}: {(await response.text())[:200]}"
                else:
                    async for line in response.content:
                        _note(line, answer)
        except TimeoutError:
            answer.error = f"not over after {_SECONDS} s"
        except (ClientError, ValueError) as error:
            answer.error = repr(error)
        if not answer.error and len(answer.tokens) < tokens:
            answer.error = f"{len(answer.tokens)} of {tokens} tokens"
        if answer.arrivals:
            answer.moments["first_token"] = answer.arrivals[0]
        answer.end = time.monotonic()
        return answer


def session() -> Any:
    """For any number of requests in flight."""
    from aiohttp import ClientSession, ClientTimeout, TCPConnector  # noqa: PLC0415 - comes with vLLM

    return ClientSession(connector=TCPConnector(limit=0), timeout=ClientTimeout(total=_SECONDS), read_bufsize=_LIMIT)


def _note(line: bytes, answer: Answer) -> None:
    """A line of a stream of events."""
    if not line.startswith(b"data: {"):
        return
    event = json.loads(line.removeprefix(b"data: "))
    if "error" in event:
        answer.error = answer.error or str(event["error"])[:200]
    for choice in event.get("choices", ()):
        if ids := choice.get("token_ids"):
            answer.arrivals.append(time.monotonic())
            answer.tokens.extend(ids)


def _body(asked: Asked, name: str) -> bytes:
    """As many letters as the prompt has tokens of text, half of them before the photographs."""
    count = asked.prompt.index(SPECIAL["<|vision_start|>"])
    rng = random.Random(str(asked.prompt))
    before, after = ("".join(rng.choices(string.ascii_letters, k=count)) for _ in range(2))
    photos = [
        {"type": "image_url", "image_url": {"url": _data_url(picture, f"{name}-{index}")}, "uuid": f"{name}-{index}"}
        for index, picture in enumerate(asked.pictures)
    ]
    content = [{"type": "text", "text": before}, *photos, {"type": "text", "text": after}]
    fields = {"temperature": 0, "max_tokens": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}).encode()


def _data_url(picture: Any, name: str) -> str:
    """A comment in the file keeps caches from knowing it from another request."""
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=_QUALITY, comment=name.encode())
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
