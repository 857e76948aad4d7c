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
    """Its address, and the names of the files that it gave away."""

    url: str
    fetched: list[str] = field(default_factory=list)


def _entry(path: Path) -> dict[str, object]:
    """A file in a listing of a repository."""
    return {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": sha1(path.read_bytes()).hexdigest()}


@contextmanager
def hub(repository: str, folder: Path) -> Iterator[Hub]:
    """Serve the files of a folder as those of a repository `owner/name`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            path = self.path.partition("?")[0]
            name = path.removeprefix(f"/{repository}/resolve/").partition("/")[2]
            if path.startswith(f"/api/models/{repository}/tree/"):
                content = json.dumps([_entry(each) for each in sorted(folder.iterdir())]).encode()
            elif path.startswith(f"/api/models/{repository}"):
                content = json.dumps({"id": repository, "sha": _COMMIT}).encode()
            else:
                content = (folder / name).read_bytes()
                if body:
                    running.fetched.append(name)
            self.send_response(200)
            headers = {
                "Content-Length": len(content),
                "ETag": f'"{sha1(content).hexdigest()}"',
                "X-Repo-Commit": _COMMIT,
            }
            for key, value in headers.items():
                self.send_header(key, str(value))
            self.end_headers()
            if body:
                self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is http.server's
            """Nothing is logged."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        running = Hub(f"http://127.0.0.1:{server.server_port}")
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield running
        finally:
            server.shutdown()
            thread.join()
