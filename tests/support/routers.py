"""`vitwire router` and what stands around it, as real processes on free ports."""

import base64
import io
import json
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import torch
from openai import OpenAI
from PIL import Image

from servers import PYTHON, ServerProcess, end, spawn
from waiting import until as until  # noqa: PLC0414 - for tests that import it from here

_VITWIRE = Path(PYTHON).with_name("vitwire")
_STOP_SECONDS = 30
CHAT = "/v1/chat/completions"


class EngineProcess(ServerProcess):
    """The stand-in engine."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def requests(self) -> list[dict[str, Any]]:
        """What it received since the last call."""
        found: list[dict[str, Any]] = self.test("requests")
        return found

    def test(self, what: str) -> Any:  # JSON
        with urlopen(Request(f"{self.url}/test/{what}", method="POST"), timeout=10) as answer:
            return json.loads(answer.read())


class RouterProcess(ServerProcess):
    """A `vitwire router`."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def engine(port: int = 0) -> Iterator[EngineProcess]:
    """A stand-in engine."""
    program = Path(__file__).with_name("engine.py")
    with _process([str(program)], [str(port)]) as (process, log):
        found = EngineProcess(process, log)
        found.port = int(found.wait_for(r"running on http://[\d.]+:(\d+)")[1])
        yield found


@contextmanager
def router(
    target: str, engine_url: str | None, *flags: str, environment: dict[str, str] | None = None
) -> Iterator[RouterProcess]:
    """A router in front of an encoder and an engine, if it has one."""
    engine_flags = ["--engine-url", engine_url] if engine_url else ["--no-engine"]
    command = ["--port", "0", "--target", target, *engine_flags, *flags]
    with _process([str(_VITWIRE), "router"], command, environment) as (process, log):
        found = RouterProcess(process, log)
        found.port = found.metrics_port = int(found.wait_for(r"listening on [\d.]+:(\d+)")[1])
        yield found


@contextmanager
def _process(
    program: Sequence[str], flags: Sequence[str], environment: dict[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    with tempfile.NamedTemporaryFile(prefix="vitwire-", suffix=".log") as log:
        process = spawn(program, flags, log.file, variables=environment)
        try:
            yield process, Path(log.name)
        finally:
            end(process, _STOP_SECONDS)


@contextmanager
def serving_file(content: bytes) -> Iterator[int]:
    """The port of a server of one file, at every path but /away, which redirects to another host."""

    class Files(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(302 if self.path == "/away" else 200)
            self.send_header("location", "http://localhost:1/file")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Files) as found:
        threading.Thread(target=found.serve_forever, args=[0.05], daemon=True).start()
        yield found.server_port
        found.shutdown()


def clip_file(frames: int, rate: float) -> bytes:
    """An MP4 file of moving pictures, made in the environment of servers, which has PyAV."""
    program = f"import encoded_files, sys; file = encoded_files.clip(encoded_files.moving({frames}), {rate})"
    command = [PYTHON, "-c", f"{program}; sys.stdout.buffer.write(file)"]
    return subprocess.run(command, check=True, capture_output=True).stdout


def sent_to_engine(target: str, parts: Sequence[Any], *flags: str, **fields: Any) -> dict[str, Any]:
    """The body of a request with these content parts, as a router sends it to its engine."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": list(parts)}], **fields}
    with engine() as stand_in, router(target, stand_in.url, *flags) as proxy:
        content = json.dumps(body).encode()
        request = Request(f"{proxy.url}{CHAT}", content, {"content-type": "application/json"})
        with urlopen(request, timeout=60):
            pass
        found: dict[str, Any] = stand_in.requests()[-1]["body"]
        return found


def client_of(proxy: RouterProcess, key: str = "sk-caller") -> OpenAI:
    return OpenAI(base_url=f"{proxy.url}/v1", api_key=key, max_retries=0, timeout=60)


def leaving(proxy: RouterProcess, body: dict[str, Any], path: str = CHAT) -> socket.socket:
    """A connection that has sent a request; close it to go away."""
    sock = socket.create_connection(("127.0.0.1", proxy.port))
    content = json.dumps(body).encode()
    sock.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
    return sock


def decoded(value: str) -> torch.Tensor:
    """Embeddings as the router hands them to an engine."""
    tensor: torch.Tensor = torch.load(io.BytesIO(base64.b64decode(value)), weights_only=True)
    return tensor


def picture(width: int = 32, height: int = 32, seed: int = 0) -> str:
    """The data URI of a PNG of noise."""
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def user(*urls: str) -> list[Any]:
    """The messages of a question about images."""
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [{"type": "text", "text": "Describe"}, *parts]}]
