"""`vitwire sglang-encoder` under attack: a receiver that does nothing wrong gets its embeddings meanwhile."""

import base64
import io
import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest
import zmq
from PIL import Image

from adapters import Adapter, adapting, receiving
from entered import entered
from fake_service import Fake, serving

ATTACKER, HONEST = "127.0.0.1", "127.0.0.2"
_SECONDS = 120

encoder = entered(lambda: serving(Fake()))
adapter = entered(lambda encoder: adapting(encoder.target, "--max-requests=40", "--drain-seconds=1"), scope="function")
receiver = entered(receiving, scope="function")


def part(ports: int | list[int] | None, req_id: str = "r") -> bytes:
    picture = io.BytesIO()
    Image.new("RGB", (32, 32)).save(picture, "PNG")
    body = {
        "mm_items": [base64.b64encode(picture.getvalue()).decode()], "req_id": req_id, "num_parts": 1, "part_idx": 0,
        "modality": "IMAGE", "prefill_host": "127.0.0.1", "embedding_port": ports,
    }  # fmt: skip
    return json.dumps(body).encode()


def post(adapter: Adapter, address: str, body: bytes, path: str = "/encode") -> int:
    place = urlsplit(adapter.http)
    assert place.hostname
    connection = HTTPConnection(place.hostname, place.port, timeout=_SECONDS, source_address=(address, 0))
    try:
        connection.request("POST", path, body)
        return connection.getresponse().status
    finally:
        connection.close()


def is_served(adapter: Adapter, receiver: tuple[zmq.Socket[bytes], int], address: str = HONEST) -> bool:
    socket, port = receiver
    if post(adapter, address, part(port)) != 200:
        return False
    while len(socket.recv_multipart()) != 2:  # errors of requests before it
        pass
    return True


@pytest.mark.parametrize("address", [HONEST, pytest.param(ATTACKER, marks=pytest.mark.matrix)])
def test_receivers_that_are_dead(adapter: Adapter, receiver: tuple[zmq.Socket[bytes], int], address: str) -> None:
    """3 requests that named 600 of them each took all sockets, and shut out everybody for a minute."""
    assert post(adapter, ATTACKER, part([1] * 600)) == 400
    with ThreadPoolExecutor(20) as pool:
        attack = [pool.submit(post, adapter, ATTACKER, part([1] * 64)) for _ in range(20)]
        time.sleep(1)  # they wait for connections
        assert is_served(adapter, receiver, address)
        assert {each.result() for each in attack} == {504}
    assert "Traceback" not in adapter.server.log()


@pytest.mark.parametrize("address", [HONEST, ATTACKER])
def test_requests_that_nobody_registers_for(
    adapter: Adapter, receiver: tuple[zmq.Socket[bytes], int], address: str
) -> None:
    """They held all slots for a minute; and SIGTERM ends the adapter although some still wait."""
    with ThreadPoolExecutor(50) as pool:
        attack = [pool.submit(post, adapter, ATTACKER, part(None, f"a{number}")) for number in range(50)]
        began = time.monotonic()
        while not is_served(adapter, receiver, address):
            assert time.monotonic() < began + 30, "they lose their places after 5 s"
            time.sleep(0.2)
        adapter.server.process.send_signal(signal.SIGTERM)
        assert adapter.server.process.wait(30) == 0
        for each in attack:
            each.exception()


def test_bodies_that_take_long_to_read(adapter: Adapter, receiver: tuple[zmq.Socket[bytes], int]) -> None:
    """JSON that would hold the event loop for seconds."""
    integers = b'{"mm_items":[' + b",".join([b"1" * 4000] * 14_000) + b"]}"
    with ThreadPoolExecutor(3) as pool:
        attack = [pool.submit(post, adapter, ATTACKER, integers) for _ in range(3)]
        waits = []
        while not all(each.done() for each in attack):
            began = time.monotonic()
            assert is_served(adapter, receiver)
            waits.append(time.monotonic() - began)
        assert {each.result() for each in attack} == {400}
    assert waits
    assert max(waits) < 15
