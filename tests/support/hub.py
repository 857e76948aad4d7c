"""A hub that serves one repository from a directory over HTTP, and remembers which files were fetched."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

_COMMIT = "0" * 40


@dataclass
class Hub:
    """Its repository and address, and which files it gave away."""

    repository: str
    folder: Path
    commit: str = _COMMIT
    url: str = ""
    fetched: list[str] = field(default_factory=list)
    resumed: list[str] = field(default_factory=list)
    """Files that were asked for from an offset on."""
    most: int | None = None
    """Bytes of a file after which the connection breaks off."""
    lost: set[str] = field(default_factory=set)
    """Files that are listed and cannot be fetched."""
    listed: dict[str, object] = field(default_factory=dict)
    """Further names and sizes in the listing, or others."""
    answer: object = None
    """What it answers in place of its listing."""

    def described(self, path: str) -> bytes | None:
        """What the Hub's API answers; None for what this hub does not have."""
        files = [each for each in sorted(self.folder.iterdir()) if each.is_file()]
        if path.startswith(f"/api/models/{self.repository}/tree/"):
            return json.dumps([_entry(each) for each in files]).encode()
        if not path.startswith(f"/api/models/{self.repository}"):
            return None
        if self.answer is not None:
            return json.dumps(self.answer).encode()
        sizes: dict[str, object] = {each.name: each.stat().st_size for each in files}
        sizes |= self.listed
        siblings = [{"rfilename": name, "size": size} for name, size in sizes.items()]
        return json.dumps({"id": self.repository, "sha": self.commit, "siblings": siblings}).encode()

    def content(self, name: str) -> bytes | None:
        """A file of the repository; None if it cannot be fetched."""
        path = self.folder / name
        return path.read_bytes() if name not in self.lost and path.is_file() else None


def _entry(path: Path) -> dict[str, object]:
    """A file in a listing of a repository."""
    return {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": sha1(path.read_bytes()).hexdigest()}


class _Server(ThreadingHTTPServer):
    def __init__(self, hub: Hub) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub = hub
        hub.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        hub, path = self.server.hub, self.path.partition("?")[0]
        if path.startswith("/api/"):
            self._send(hub.described(path), body=body)
            return
        name = path.removeprefix(f"/{hub.repository}/resolve/").partition("/")[2]
        first = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0]) if body else 0
        if body:
            hub.fetched.append(name)
        if first:
            hub.resumed.append(name)
        self._send(hub.content(name), body=body, first=first, most=hub.most)

    def _send(self, content: bytes | None, *, body: bool, first: int = 0, most: int | None = None) -> None:
        if content is None:
            self.send_error(404)
            return
        self.send_response(206 if first else 200)
        self.send_header("Content-Length", str(len(content) - first))
        self.send_header("ETag", f'"{sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", self.server.hub.commit)
        if most is not None:
            self.send_header("Connection", "close")
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if body:
            self.wfile.write(content[first:] if most is None else content[first : first + most])

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is http.server's
        """Nothing is logged."""


@contextmanager
def hub(repository: str, folder: Path, commit: str = _COMMIT) -> Iterator[Hub]:
    """Serve the files of a folder as those of a repository `owner/name` at a commit."""
    running = Hub(repository, folder, commit)
    with _Server(running) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield running
        finally:
            server.shutdown()
            thread.join()
