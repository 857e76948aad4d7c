"""`vitwire parity` against servers that answer what the file says: what a real engine cannot be made to answer."""

import json
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from vitwire_cli.app import app

LIKELY = {"a": -0.5, "b": -1.0}


def said(text: str = "a", likely: dict[str, float] = LIKELY, ids: tuple[int, ...] = (1, 2)) -> dict[str, Any]:
    top = [{"token": token, "logprob": value} for token, value in likely.items()]
    choice = {"message": {"content": text}, "logprobs": {"content": [{"token": text, "top_logprobs": top}]}}
    return {"choices": [choice], "usage": {"prompt_tokens": len(ids)}, "prompt_token_ids": ids}


@contextmanager
def engine(place: int) -> Iterator[str]:
    """Answers with one of the two answers that a file has."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            part = body["messages"][0]["content"][0]
            answer = json.loads(b64decode(part[part["type"]]["url"].partition(",")[2]))[place]
            answer = answer if self.headers["authorization"] == "Bearer key" else 401
            if answer == "closed":
                return
            self.send_response(answer if isinstance(answer, int) else 200)
            self.end_headers()
            refused = {"error": {"message": 'not\\n"taken"', "type": "x"}}
            self.wfile.write(json.dumps(refused if isinstance(answer, int) else answer).encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        Thread(target=server.serve_forever, args=[0.05], daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def compared(folder: Path, files: dict[str, Any]) -> tuple[Result, list[dict[str, Any]]]:
    for name, pair in files.items():
        (folder / name).write_text(json.dumps(pair))
    with engine(0) as tower, engine(1) as encoder:
        words = ["parity", "--engine", f"{tower}/v1", "--with-encoder", encoder, "--images", str(folder)]
        done = CliRunner().invoke(app, [*words, "--timeout", "5", "--api-key", "key"], env={"COLUMNS": "200"})
    return done, json.loads(done.stdout.splitlines()[-1])["files"] if done.stdout else []


def test_what_differs_is_listed_first(tmp_path: Path) -> None:
    files = {
        "same.png": [said(), said()],
        "tie.png": [said(likely={"a": -0.6, "b": -0.7}), said("b", {"a": -0.7, "b": -0.6})],
        "near.png": [said(), said(likely={"a": -0.5, "c": -1.1})],
        "far.png": [said(), said(likely={"a": -0.5, "b": -1.5})],
        "[b]other.png": [said(), said("c", {"c": -0.1, "d": -3.0})],
        "clip.mp4": [said(), said(ids=(1, 3))],
        "word.png": [said(likely={}), said("b", {})],
        "refused.png": [said(), 400],
        "both.png": [422, 422],
    }
    done, rows = compared(tmp_path, files)
    differs = {row["file"]: row["differs"] for row in rows if row["differs"]}
    assert differs == {
        "refused.png": "status",
        "[b]other.png": "log probabilities, first token",
        "far.png": "log probabilities",
        "clip.mp4": "prompt",
        "word.png": "first token",
    }
    assert [row["file"] for row in rows[: len(differs)]] == list(differs)
    assert {row["file"]: row["difference"] for row in rows if row["difference"]} == {
        "[b]other.png": 2.5,
        "far.png": 0.5,
        "tie.png": 0.1,
        "near.png": 0.1,
    }
    assert done.exit_code == 1
    assert "[b]other.png" in done.stdout.partition("{")[0]
    assert "does not say what the encoder encoded" in done.stderr


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no files"),
        ({"a.png": [401, 401]}, "no file was answered: not"),
        ({"a.png": [said(), said()], "b.png": [said(), "closed"]}, "--with-encoder http://127.0.0.1:"),
        ({"a.png": [said(), {"choices": []}]}, "not a chat completion"),
    ],
)
def test_what_cannot_be_compared(files: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Exits with 2, after what was compared."""
    done, rows = compared(tmp_path, files)
    assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1), done.output
    assert message in done.stderr
    assert len(rows) == (message.startswith(("--with", "no file")))


def test_usage(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"")
    for url, folder in (("127.0.0.1:1", tmp_path), ("http://127.0.0.1:1", tmp_path), ("http://a", tmp_path / "none")):
        words = ["--engine", url, "--with-encoder", url, "--images", str(folder)]
        done = CliRunner().invoke(app, ["parity", *words])
        assert done.exit_code == 2
        assert (f"--engine {url}: " if folder == tmp_path else "--images") in done.stderr
