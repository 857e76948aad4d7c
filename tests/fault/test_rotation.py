"""Certificates and tokens replaced again and again while clients encode: no valid client is refused."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from certificates import Authority
from checkpoints import Checkpoints
from faults import Note, scaled, settle
from load import image, request
from servers import serving
from vitwire.v1.encoder_pb2_grpc import EncoderServiceStub

pytestmark = pytest.mark.timeout(900)

STEADY = "steady-0123456789abcdef"
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)


def encode(channel: grpc.Channel, token: str) -> str:
    """The status of a request with this token."""
    try:
        stub = EncoderServiceStub(channel)
        list(stub.Encode(request(image()), metadata=(("authorization", f"Bearer {token}"),), timeout=30))
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


class Callers:
    """One client that keeps its connection, and one that opens a new one each time; both without a pause."""

    def __init__(self, connect: Callable[[], grpc.Channel]) -> None:
        self._connect = connect
        self._over = threading.Event()
        self._threads = [threading.Thread(target=work) for work in (self._stay, self._come_and_go)]
        self.codes: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()

    def _stay(self) -> None:
        with self._connect() as channel:
            while not self._over.is_set():
                self.codes[encode(channel, STEADY)] += 1

    def _come_and_go(self) -> None:
        while not self._over.is_set():
            with self._connect() as channel:
                self.codes[encode(channel, STEADY)] += 1
                self.refused[encode(channel, "no-token-0123456789")] += 1

    def __enter__(self) -> "Callers":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


def replace(file: Path, text: str) -> None:
    fresh = file.with_suffix(".new")
    fresh.write_text(text)
    fresh.replace(file)


def test_certificates_and_tokens_are_rotated_under_load(checkpoints: Checkpoints, tmp_path: Path, note: Note) -> None:
    authority, tokens, rotations = Authority(tmp_path / "pki").issue(), tmp_path / "tokens", scaled(30, 2)
    replace(tokens, f"{STEADY} steady\n")
    files = ("--tls-cert", authority.cert, "--tls-key", authority.key, "--auth-tokens-file", tokens)
    with serving(checkpoints("qwen2_vl"), "--dtype", "float32", *map(str, files)) as server:

        def connect() -> grpc.Channel:
            return grpc.secure_channel(server.target, authority.credentials(), OWN_CONNECTION)

        with Callers(connect) as callers, connect() as channel:
            for rotation in range(rotations):
                authority.issue()
                replace(tokens, f"{STEADY} steady\nrotating-{rotation:016d} rotating\n")
                while encode(channel, f"rotating-{rotation:016d}") != "OK":
                    time.sleep(0.05)
                if rotation:
                    assert encode(channel, f"rotating-{rotation - 1:016d}") == "UNAUTHENTICATED"
        settle(server)
        renewed = server.log().count("certificate reloaded")
    codes, refused = dict(callers.codes), dict(callers.refused)
    note(rotations=rotations, certificates_taken=renewed, codes=codes, without_token=refused)
    assert codes.keys() == {"OK"}
    assert refused.keys() == {"UNAUTHENTICATED"}
    assert renewed
