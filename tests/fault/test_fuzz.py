"""Hostile messages over the wire, for five minutes in full: nothing breaks, leaks or is blamed on the server."""

import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings

from entered import entered
from faults import SCALE, Note, rss_mib, settle
from load import COLUMNS, UNLIMITED, grpc_code
from reference import TOLERANCE, Reference, error
from servers import ServerProcess, serving
from vitwire import Client, Item
from vitwire.v1 import encoder_pb2 as pb
from vitwire_server.core.grids import Grid
from wirefuzz import BAD_ITEM, BAD_REQUEST, GOOD_REQUEST, headers, mangled, requests, uploads

pytestmark = pytest.mark.timeout(1200)

SERVICE = "/vitwire.v1.EncoderService"
SECONDS = max(10.0, 300 * SCALE)
ROUND = 100
MOST_GROWTH_MIB = 64
MISTAKES = {"INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED"}
"""Codes for a client's mistakes."""
Codes = Counter[str]


BOUNDS = ("--max-queued-items", "64", "--max-queued-bytes", str(256 << 20), "--max-patches-per-item", "4096")
GRAPHS = ("--graphs", "simulated", "--budgets", "16,64,256", "--max-budget-tokens", "256")
FLAGS = (*BOUNDS, *GRAPHS, "--dtype", "float32", "--cache-bytes", str(8 << 20))

hardened = entered(lambda checkpoints: serving(checkpoints("qwen2_vl"), *FLAGS))
"""A server with everything on that a message can reach."""


class Fuzzer:
    """Sends what is drawn, and holds the server to its word."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.codes: Codes = Counter()
        self._encode = channel.unary_stream(f"{SERVICE}/Encode")
        self._stream = channel.stream_stream(f"{SERVICE}/EncodeStream")
        self._model = channel.unary_unary(f"{SERVICE}/GetModel")
        self._health = channel.unary_unary("/grpc.health.v1.Health/Check")

    def encode(self, raw: bytes, metadata: Any) -> None:
        self._judge(lambda: list(self._encode(raw, metadata=metadata, timeout=30)), pb.EncodeResponse)

    def encode_stream(self, raw: Sequence[bytes], metadata: Any) -> None:
        call = lambda: list(self._stream(iter(raw), metadata=metadata, timeout=30))  # noqa: E731
        self._judge(call, pb.EncodeStreamResponse)

    def get_model(self, raw: bytes) -> None:
        self._judge(lambda: [self._model(raw, timeout=30)], None)

    def health(self, raw: bytes) -> None:
        self._judge(lambda: [self._health(raw, timeout=30)], None)

    def cancel(self, raw: Sequence[bytes]) -> None:
        """Leave in the middle."""
        call = self._stream(iter(raw), timeout=30)
        call.cancel()
        self.codes["left"] += 1

    def _judge(self, call: Callable[[], list[bytes]], kind: Any) -> None:
        try:
            answers = call()
        except grpc.RpcError as refused:
            code = refused.code().name
            assert code in MISTAKES, f"{code}: {refused.details()}"
            self.codes[code] += 1
            return
        self.codes["OK"] += 1
        for answer in (kind.FromString(each) for each in answers) if kind else ():
            if answer.HasField("error"):
                code = grpc_code(answer.error.code)
                message = answer.error.message
                assert code in MISTAKES or (code == "INTERNAL" and "not finite" in message), f"{code}: {message}"
                self.codes[f"item {code}"] += 1


class Good:
    """A request whose answer is known, from plain transformers."""

    def __init__(self, target: str, reference: Reference) -> None:
        self._client = Client(target, timeout=60)
        self._pixels = np.random.default_rng(0).standard_normal((64, COLUMNS), np.float32)
        self._rows = reference.encode(torch.from_numpy(self._pixels), [Grid(1, 8, 8)])[0]
        self.sent = 0

    def check(self) -> None:
        (small,) = self._client.encode([Item(self._pixels, (1, 8, 8))], output_type="float32")
        assert error(small.numpy(), self._rows) <= TOLERANCE
        self.sent += 1

    def close(self) -> None:
        self._client.close()


def garbage(port: int, rng: random.Random) -> None:
    """Bytes that are no HTTP/2, or only begin as if they were."""
    opening = rng.choice([b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/1.1\r\n", b"\x16\x03\x01\x02\x00"])
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(opening + rng.randbytes(rng.randint(0, 4096)))
        connection.settimeout(0.05)
        connection.recv(4096)


def fuzz(fuzzer: Fuzzer) -> list[Callable[[], None]]:
    """Rounds of examples, one for each way in: those that no round may miss, then drawn ones, shrunk on failure."""
    drawn = settings(
        max_examples=ROUND,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    return [
        drawn(example(GOOD_REQUEST, ())(example(BAD_REQUEST, ())(given(requests(), headers())(fuzzer.encode)))),
        drawn(example(BAD_ITEM, ())(given(uploads(), headers())(fuzzer.encode_stream))),
        drawn(given(uploads())(fuzzer.cancel)),
        drawn(given(mangled(b""))(fuzzer.get_model)),
        drawn(given(mangled(b"\x0a\x03abc"))(fuzzer.health)),
    ]


def test_hostile_messages(
    hardened: ServerProcess, references: Callable[[str, torch.dtype], Reference], note: Note
) -> None:
    server, rng = hardened, random.Random(0)
    good = Good(server.target, references("qwen2_vl", torch.float32))
    with grpc.insecure_channel(server.target, UNLIMITED) as channel:
        fuzzer = Fuzzer(channel)
        encode, stream, cancel, model, health = fuzz(fuzzer)
        began, rounds, warm = time.monotonic(), 0, 0.0
        while rounds < 2 or time.monotonic() - began < SECONDS:
            rounds += 1
            encode()
            good.check()
            stream()
            good.check()
            for rare in (cancel, model, health):
                rare()
            for _ in range(20):
                garbage(server.port, rng)
                garbage(server.metrics_port, rng)
            if not warm and time.monotonic() - began > SECONDS / 3:
                warm = rss_mib(server)
    good.check()
    good.close()
    settle(server)
    assert server.process.poll() is None
    after = rss_mib(server)
    tried = sum(count for code, count in fuzzer.codes.items() if not code.startswith("item "))
    note(
        seconds=round(time.monotonic() - began),
        messages=tried,
        codes=dict(fuzzer.codes),
        good=good.sent,
        rss_warm=warm,
        rss_after=after,
    )
    assert {"OK", "INVALID_ARGUMENT", "item INVALID_ARGUMENT"} <= fuzzer.codes.keys(), "all ways were tried"
    assert after - warm < MOST_GROWTH_MIB
    assert "Traceback" not in server.log()
    internal = server.metric("vitwire_requests_total", code="INTERNAL")
    assert internal <= fuzzer.codes["item INTERNAL"], "finite pixels whose embeddings are not, and nothing else"
    assert server.page("/healthz")[0] == 200
