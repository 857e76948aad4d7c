"""`vitwire sglang-encoder` as a real process on free ports."""

import io
import pickle
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import zmq

from servers import ServerProcess, spawn


class Adapter(NamedTuple):
    server: ServerProcess
    http: str


@contextmanager
def adapting(target: str, *flags: str) -> Iterator[Adapter]:
    program = ["-c", "from vitwire_cli import main; main()"]
    command = ["sglang-encoder", "--target", target, "--port", "0", *flags]
    with tempfile.NamedTemporaryFile(prefix="adapter-", suffix=".log") as log:
        server = ServerProcess(spawn(program, command, log.file), Path(log.name))
        try:
            found = server.wait_for(r"listening on (http://\S+)\s")
            yield Adapter(server, found[1])
        finally:
            if server.process.poll() is None:
                server.stop()


@contextmanager
def receiving() -> Iterator[tuple[zmq.Socket[bytes], int]]:
    """A socket as SGLang's receivers bind it, and its port."""
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.linger = 0
        socket.rcvtimeo = 120_000
        yield socket, socket.bind_to_random_port("tcp://127.0.0.1")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return getattr(torch, name) if module == "torch" else {"EmbeddingData": SimpleNamespace, "Modality": int}[name]


def read(frames: Sequence[bytes]) -> tuple[Any, torch.Tensor | None]:
    """Header and rows of a message to a receiver."""
    header = _Unpickler(io.BytesIO(frames[0])).load()
    if len(frames) == 1:
        return header, None
    return header, torch.frombuffer(bytearray(frames[1]), dtype=header.dtype).reshape(header.shape)
