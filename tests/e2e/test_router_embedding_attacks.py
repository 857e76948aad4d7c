"""Hostile requests for embeddings: others are answered meanwhile, and nothing is left of them."""

import json
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Event

import httpx2
import pytest

from callers import ask, caller
from checkpoints import Checkpoints
from embedding_calls import EMBEDDINGS, FLAGS, Json
from entered import entered
from fake_service import Fake
from fake_service import serving as serving_fake
from routers import RouterProcess, picture, router
from servers import ServerProcess, serving
from waiting import until

ATTACKER, HONEST = "127.0.0.1", "127.0.0.2"
_SECONDS = 120

server = entered(lambda checkpoints: serving(checkpoints("clip"), *FLAGS))
"""Its images have several vectors."""


def pictures(number: int, seed: int = 0) -> Json:
    return {"input": [picture(seed=seed + each) for each in range(number)]}


BODIES = [
    b'{"input": [' + b"1," * 900_000 + b"1]}",
    b'{"input": [' + b"[" * 900_000 + b"]" * 900_000 + b"]}",
    b'{"input": ["data:image/png;base64,' + b"!" * 20_000_000 + b'"]}',
    b'{"input": [' + b'"data:image/png;base64,QUJD",' * 400_000 + b'"x"]}',
    b'{"messages": [' + b'{"content":[{"image_url":""}]},' * 150_000 + b"{}]}",
    b'{"input": "data:image/png;base64,QUJD", "dimensions": ' + b"9" * 4000 + b"}",
    b'{"images": [' + b"{}," * 400_000 + b"{}]}",
    b"\xff" * 1000,
    b"null",
    b"",
]


@pytest.mark.parametrize("path", [EMBEDDINGS, "/v2/embed"])
def test_bodies_that_take_long(proxy: RouterProcess, path: str) -> None:
    with caller(proxy, ATTACKER) as attacker, ThreadPoolExecutor(4) as pool:
        attack = [pool.submit(attacker.post, path, content=body) for body in BODIES]
        assert ask(proxy, HONEST, EMBEDDINGS, json=pictures(1)) == 200
        found = [each.result() for each in attack]
    assert [each.status_code for each in found] == [400] * len(BODIES)
    assert max(len(each.content) for each in found) < 1000
    assert "Traceback" not in proxy.log()


def test_answers_that_nobody_reads(proxy: RouterProcess) -> None:
    """One image in 64 places is 64 times its vectors: others get their turn between the chunks."""
    body = json.dumps({"input": [picture()] * 64}).encode()
    with ExitStack() as stack:
        for _ in range(48):
            stack.enter_context(sock := socket.create_connection(("127.0.0.1", proxy.port)))
            sock.sendall(
                f"POST {EMBEDDINGS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
            )
        until(lambda: proxy.metric("vitwire_router_inflight_requests") >= 24)
        for seed in range(3):
            assert ask(proxy, HONEST, EMBEDDINGS, json=pictures(4, seed)) == 200
    until(lambda: proxy.metric("vitwire_router_inflight_requests") == 0)
    until(lambda: proxy.metric("vitwire_router_buffered_bytes") == 0)
    assert "Traceback" not in proxy.log()


def test_vectors_that_take_too_much(server: ServerProcess) -> None:
    """An image is held once, and its vectors count in each place."""
    with router(server.target, None, "--max-buffered-bytes", "100000") as proxy:
        assert ask(proxy, HONEST, EMBEDDINGS, json={"input": [picture(4, 4)] * 4}) == 200
        with caller(proxy, HONEST) as client:
            answer = client.post(EMBEDDINGS, json={"input": [picture(4, 4)] * 64})
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
        assert proxy.metric("vitwire_router_buffered_bytes") == 0


def test_images_that_take_long() -> None:
    """One caller's hold 3/4 of the turns at most, and SIGTERM ends the router."""
    fake, freed, held = Fake(), Event(), list[int]()
    encode = fake.EncodeStream

    def hold(requests, context):  # noqa: ANN001, ANN202
        sent = list(requests)
        number = sum(request.WhichOneof("message") == "header" for request in sent)
        if number > 1:
            held.append(number)
            freed.wait(_SECONDS)
        return encode(iter(sent), context)

    fake.EncodeStream = hold  # type: ignore[method-assign]
    with (
        serving_fake(fake) as encoder,
        router(encoder.target, None, "--drain-seconds=1", "--max-encoding=16") as proxy,
        ThreadPoolExecutor(3) as pool,
    ):
        try:
            attackers = [pool.submit(cut_off, proxy, pictures(64, 64 * number)) for number in range(3)]
            until(lambda: sum(held) == 12, _SECONDS)
            for seed in (1000, 1001):
                assert ask(proxy, HONEST, EMBEDDINGS, json=pictures(1, seed)) == 200
            assert (sum(held), any(each.done() for each in attackers)) == (12, False)
            proxy.process.send_signal(signal.SIGTERM)
            assert proxy.process.wait(60) == 0
            assert all(each.result() for each in attackers)
        finally:
            freed.set()
        assert "Traceback" not in proxy.log()


def cut_off(proxy: RouterProcess, request: Json) -> bool:
    """Whether the router ended the request when it ended itself."""
    try:
        return ask(proxy, ATTACKER, EMBEDDINGS, json=request) != 200
    except httpx2.TransportError:
        return True


def test_an_encoder_that_dies_or_hangs(checkpoints: Checkpoints) -> None:
    """Requests in flight fail with its error, and leave no turn taken."""
    flags = ("--encoder-wait", "2", "--encoder-retries", "1", "--max-encoding", "4")
    with (
        serving(checkpoints("clip"), *FLAGS, "--pooling", "cls") as server,
        router(server.target, None, *flags) as proxy,
        ThreadPoolExecutor(4) as pool,
    ):
        until(lambda: ask(proxy, HONEST, EMBEDDINGS, json=pictures(8)) == 200)  # the first takes long on a busy machine
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            frozen = [pool.submit(ask, proxy, ATTACKER, EMBEDDINGS, json=pictures(8, seed)) for seed in range(4)]
            assert {each.result() for each in frozen} <= {503, 504}
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        until(lambda: ask(proxy, HONEST, EMBEDDINGS, json=pictures(8)) == 200)
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait(10)
        assert {ask(proxy, HONEST, EMBEDDINGS, json=pictures(8)) for _ in range(2)} <= {503, 504}
        assert proxy.page("/health")[0] == 503
        assert proxy.metric("vitwire_router_failures_total", upstream="encoder") >= 6
        assert "Traceback" not in proxy.log()
        assert "never retrieved" not in proxy.log()


def test_requests_that_wait_for_a_silent_encoder() -> None:
    """No request waits for those before it."""
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        router(f"127.0.0.1:{silent.getsockname()[1]}", None, "--encoder-wait", "1") as proxy,
        ThreadPoolExecutor(8) as pool,
    ):
        began = time.monotonic()
        asked = [pool.submit(ask, proxy, ATTACKER, EMBEDDINGS, json=pictures(1)) for _ in range(8)]
        assert {each.result() for each in asked} <= {503, 504}
        assert time.monotonic() - began < 5


def test_an_encoder_with_new_weights() -> None:
    """No answer has vectors of two models."""
    fake = Fake()
    encode = fake.Encode

    def change(request, context):  # noqa: ANN001, ANN202
        if fake.fingerprint != "new":
            fake.fingerprint = "new"
            time.sleep(2.1)  # the router asks for the model again after 2 s
        return encode(request, context)

    fake.Encode = change  # type: ignore[method-assign]
    with serving_fake(fake) as encoder, router(encoder.target, None, "--max-encoding", "1") as proxy:
        with caller(proxy, HONEST) as client:
            answer = client.post(EMBEDDINGS, json=pictures(2))
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "encoder_unavailable")
        assert ask(proxy, HONEST, EMBEDDINGS, json=pictures(2)) == 200


def test_a_server_that_prepares_nothing(checkpoints: Checkpoints) -> None:
    with (
        serving(checkpoints("clip"), *FLAGS, "--decode-processes", "0") as server,
        router(server.target, None) as proxy,
        caller(proxy, HONEST) as client,
    ):
        answer = client.post(EMBEDDINGS, json=pictures(2))
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "encoder_without_decoders")
