"""A client process of `make engine-bench`: streaming chat completions over HTTP, on uvloop where it is installed.

One JSON command a line on stdin, one JSON answer a line on stdout. `prepare` makes the bodies of this process's part of
a stream, `run` sends them and writes the answers to the file that it names: a pipe has cut a line of 1 MB at 64 KB.
`bench/engine/clients.py` is the other side. HTTP is written by hand, a connection for each request: a client library
would take more time for an event than the servers do.
"""

import asyncio
import gc
import json
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.commands import answer_commands
from bench.engine.answers import Answer
from bench.engine.loads import Load, arrivals
from bench.engine.photos import Prompts

Row = dict[str, Any]
SECONDS = 120
"""For a whole request: one that nobody answers counts as an error, and does not end the run."""
_LIMIT = 1 << 24
"""Bytes of one line."""


class Stream:
    """The requests of a stream that this process sends: every `parts`th from `part` on."""

    def __init__(self, prompts: Prompts, count: int, part: int, parts: int) -> None:
        self._prompts = prompts
        self._count = count
        self._numbers = range(part, count, parts)
        self._bodies = [prompts.body(number) for number in self._numbers]

    async def run(self, urls: Sequence[str], load: Load, in_flight: int, at: float, label: str) -> list[Answer]:
        """Send them from the time `at` on, `in_flight` at once or as they arrive; a request's URL is by its number."""

        async def one(index: int) -> Answer:
            number = self._numbers[index]
            url, name = urls[number % len(urls)], f"{label}-{number}"
            answer = await requested(url, self._bodies[index], name, self._prompts.tokens)
            answer.number, answer.images = number, self._prompts.images(number)
            answer.start = at + due[number] if due else answer.start
            return answer

        due = [] if load.closed else arrivals(load.amount, self._count, self._prompts.seed)
        await asyncio.sleep(at - time.monotonic())
        if load.closed:
            return await _looped(range(len(self._bodies)), in_flight, one)
        tasks = []
        for index, number in enumerate(self._numbers):
            await asyncio.sleep(at + due[number] - time.monotonic())
            tasks.append(asyncio.create_task(one(index)))
        return list(await asyncio.gather(*tasks))


async def _looped(indices: Iterable[int], in_flight: int, one: Callable[[int], Any]) -> list[Answer]:
    remaining = iter(indices)

    async def loop() -> list[Answer]:
        return [await one(index) for index in remaining]

    return [answer for each in await asyncio.gather(*(loop() for _ in range(in_flight))) for answer in each]


async def requested(url: str, body: bytes, name: str, tokens: int) -> Answer:
    """A chat completion, `tokens` long, whose id is `name`; failures of any of the servers are noted."""
    answer = Answer(start=time.monotonic())
    try:
        async with asyncio.timeout(SECONDS):
            await _exchanged(url, body, name, answer)
    except TimeoutError:
        answer.error = f"not over after {SECONDS:g} s"
    except (OSError, EOFError, ValueError) as error:
        answer.error = answer.error or f"{type(error).__name__}: {error}"
    if not answer.error and (answer.tokens < tokens or not answer.arrivals):
        answer.error = f"{answer.tokens} of {tokens} tokens, in {len(answer.arrivals)} messages"
    answer.end = time.monotonic()
    return answer


async def _exchanged(url: str, body: bytes, name: str, answer: Answer) -> None:
    """Raises OSError, EOFError or ValueError if a server does not keep to HTTP."""
    where = urlsplit(url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port, limit=_LIMIT)
    try:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {where.netloc}\r\nx-request-id: {name}\r\n"
        head += f"content-type: application/json\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        status, *fields = (await reader.readuntil(b"\r\n\r\n")).lower().splitlines()
        if status.split()[1] != b"200":
            answer.error = f"HTTP {status.split()[1].decode()}: {(await reader.read(300)).decode(errors='replace')}"
            return
        is_chunked = any(b"transfer-encoding" in field and b"chunked" in field for field in fields)
        await _followed(reader, answer, is_chunked=is_chunked)
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def _followed(reader: asyncio.StreamReader, answer: Answer, *, is_chunked: bool) -> None:
    """Note the events of a response until its end."""
    rest = b""
    while True:
        if is_chunked:
            size = int((await reader.readline()).partition(b";")[0] or b"x", 16)  # cut off: no number
            chunk = (await reader.readexactly(size + 2))[:-2]
        else:
            chunk = await reader.read(1 << 16)
        if not chunk:
            return
        now = time.monotonic()
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                _note(json.loads(line[6:]), answer, now)


def _note(event: Row, answer: Answer, now: float) -> None:
    """Tokens are counted by their ids, else a message is one, until the usage says how many."""
    if "error" in event:
        answer.error = answer.error or str(event["error"])[:200]
    for choice in event.get("choices", ()):
        ids, delta = choice.get("token_ids"), choice.get("delta", {})
        if ids or (ids is None and (delta.get("content") or "role" not in delta)):
            answer.arrivals.append(now)
            answer.tokens += len(ids or (0,))
    if (usage := event.get("usage")) and not event.get("choices"):
        answer.tokens = usage["completion_tokens"]


def _run(stream: Stream, command: Row) -> list[Row]:
    command["load"] = Load.of(command["load"])
    gc.collect()
    gc.disable()
    try:
        import uvloop  # type: ignore[import-not-found]  # noqa: PLC0415 - where it is installed

        factory = uvloop.new_event_loop
    except ImportError:
        factory = None
    with asyncio.Runner(loop_factory=factory) as runner:
        answers = runner.run(stream.run(**command))
    gc.enable()
    return [asdict(answer) for answer in answers]


class Streams:
    """Answers commands; one stream at a time is prepared."""

    stream: Stream | None = None

    def answer(self, command: Row) -> Row:
        if "run" in command:
            assert self.stream, "a stream is prepared first"
            rows = _run(self.stream, command["run"])
            Path(command["answers"]).write_text(json.dumps(rows), encoding="utf-8")
            return {"answers": len(rows)}
        self.stream = None  # its bodies would be there twice
        prompts = Prompts(**command["prepare"].pop("prompts"))
        self.stream = Stream(prompts, **command["prepare"])
        return {}


if __name__ == "__main__":
    answer_commands(Streams().answer)
