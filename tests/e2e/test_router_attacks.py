"""`vitwire router` under attack: a client that does nothing wrong is served meanwhile, and SIGTERM ends the router."""

import base64
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from threading import Event
from typing import Any

import httpx2
import pytest
from PIL import Image

from callers import ask, caller
from encoded_files import saved
from entered import entered
from fake_service import Fake, Running, serving
from routers import CHAT, EngineProcess, RouterProcess, router
from waiting import until

ATTACKER, HONEST = "127.0.0.1", "127.0.0.2"
_SECONDS = 120

encoder = entered(lambda: serving(Fake()))
proxy = entered(lambda encoder, stand_in: router(encoder.target, stand_in.url))


def file(kind: str, side: int, seed: int = 0) -> bytes:
    return saved(Image.new("P", (side, side), seed), kind)


def chat(*images: bytes) -> dict[str, Any]:
    urls = [f"data:image/x;base64,{base64.b64encode(each).decode()}" for each in images]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"model": "tiny", "messages": [{"role": "user", "content": [{"type": "text", "text": "?"}, *parts]}]}


@contextmanager
def begun(proxy: RouterProcess, number: int, body: bytes, announced: int) -> Iterator[None]:
    """Requests whose bodies do not go on."""
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {announced}\r\n\r\n".encode()
    with ExitStack() as stack:
        for _ in range(number):
            stack.enter_context(sock := socket.create_connection(("127.0.0.1", proxy.port)))
            sock.sendall(head + body)
        yield


@contextmanager
def holding(kind: bytes) -> Iterator[tuple[str, list[int]]]:
    """An encoder that does not answer for files that begin with `kind` until the end; its target, and their sizes."""
    fake, freed, held = Fake(), Event(), list[int]()
    encode = fake.Encode

    def hold(request, context):  # noqa: ANN001, ANN202
        if request.items[0].encoded.startswith(kind):
            held.append(len(request.items[0].encoded))
            freed.wait(_SECONDS)
        return encode(request, context)

    fake.Encode = hold  # type: ignore[method-assign]
    with serving(fake) as running:
        try:
            yield running.target, held
        finally:
            freed.set()


def test_pictures_that_take_long(stand_in: EngineProcess) -> None:
    """One caller's hold 3/4 of the turns at most; and SIGTERM ends the router although hundreds are left."""
    picture = file("gif", 32)  # bytes behind it make files differ
    attack = [chat(*(picture + b"%d" % (64 * request + number) for number in range(64))) for request in range(3)]
    with (
        holding(b"GIF8") as (target, held),
        router(target, stand_in.url, "--drain-seconds=1", "--max-encoding=16") as proxy,
        ThreadPoolExecutor(3) as pool,
    ):
        attackers = [pool.submit(ended, proxy, request) for request in attack]
        until(lambda: len(held) == 12, _SECONDS)
        for seed in (1, 2):
            assert ask(proxy, HONEST, json=chat(file("png", 32, seed))) == 200
        assert len(held) == 12
        assert not any(each.done() for each in attackers), "the attack goes on"
        proxy.process.send_signal(signal.SIGTERM)
        assert proxy.process.wait(60) == 0
        for each in attackers:
            each.result()
        assert "Traceback" not in proxy.log()


def ended(proxy: RouterProcess, request: dict[str, Any]) -> None:
    """A request that the router refuses, or cuts off, when it ends."""
    with suppress(httpx2.TransportError):
        assert ask(proxy, ATTACKER, json=request) != 200


@pytest.mark.parametrize(
    "content",
    [b"%s" % (b"1" * 4000), pytest.param(b"1." + b"1" * 4000, marks=pytest.mark.matrix), b'{"":[0]}'],
)
def test_json_that_takes_long(proxy: RouterProcess, content: bytes) -> None:
    """57 MB of integers of 4,000 digits took 4.5 s of the event loop."""
    body = b'{"messages":[' + b",".join([content] * min(57_000_000 // len(content), 200_000)) + b"]}"
    with ThreadPoolExecutor(4) as pool:
        attack = [pool.submit(ask, proxy, ATTACKER, content=body) for _ in range(4)]
        waits = list(served_during(proxy, attack))
        assert {each.result() for each in attack} <= {200, 400}
    assert waits
    assert max(waits) < 4


def served_during(proxy: RouterProcess, attack: list[Future[int]]) -> Iterator[float]:
    with caller(proxy, HONEST) as honest:
        while not all(each.done() for each in attack):
            began = time.monotonic()
            assert honest.get("/livez").status_code == 200
            yield time.monotonic() - began


def test_bodies_that_do_not_arrive(encoder: Running, stand_in: EngineProcess) -> None:
    """They take no place among the requests in flight, and no longer than a moment to end with the router."""
    with (
        router(encoder.target, stand_in.url, "--max-requests=40", "--body-seconds=300", "--drain-seconds=300") as proxy,
        begun(proxy, 45, b"{", 1000),
    ):
        until(lambda: proxy.metric("vitwire_router_buffered_bytes") == 45)
        assert ask(proxy, ATTACKER, json=chat(file("png", 32))) == 200
        proxy.process.send_signal(signal.SIGTERM)
        assert proxy.process.wait(60) == 0


def test_memory_that_stalled_bodies_hold(encoder: Running, stand_in: EngineProcess) -> None:
    """They lose it to others, of the same caller too."""
    flags = ("--max-buffered-bytes=2000000", "--max-body-bytes=1500000", "--max-image-bytes=100000")
    request = chat(file("png", 32)) | {"text": "x" * 700_000}
    with (
        router(encoder.target, stand_in.url, *flags, "--body-seconds=300") as proxy,
        begun(proxy, 2, bytes(700_000), 800_000),
    ):
        until(lambda: proxy.metric("vitwire_router_buffered_bytes") == 1_400_000)
        until(lambda: ask(proxy, ATTACKER, json=request) == 200, _SECONDS)


def test_the_engines_administration_is_not_reached(proxy: RouterProcess, stand_in: EngineProcess) -> None:
    stand_in.requests()
    with caller(proxy, HONEST) as client:
        for path in ("/tokenize_admin", "/versions", "/v1beta/models", "/score-all"):
            assert client.get(path).status_code == 404
        for path in ("/tokenize", "/v1/models", "/score/x"):
            assert client.get(path).status_code == 200
    assert [each["path"] for each in stand_in.requests()] == ["/tokenize", "/v1/models", "/score/x"]
