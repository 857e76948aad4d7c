"""Parts of the router that need no network: keys, headers, settings."""

import os
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vitwire_cli.app import app
from vitwire_gateway.api_errors import ApiError
from vitwire_gateway.gateway_settings import RouterSettings
from vitwire_gateway.router.admission import ApiKeys
from vitwire_gateway.router.llm_engine import forwarded
from vitwire_gateway.router.routing import refused_path


def test_keys_are_read_again(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# a comment\nfirst\n\nsecond\n")
    keys = ApiKeys(file)
    keys.check("Bearer first")
    keys.check("bearer second")
    for wrong in (None, "", "Bearer", "Bearer third", "Basic first", "first", "Bearer # a comment", "Bearer \udcff"):
        with pytest.raises(ApiError) as caught:
            keys.check(wrong)
        assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
    file.write_text("  third-key-changed\t\n  # one more comment\n")
    keys.check("Bearer third-key-changed")
    with pytest.raises(ApiError):
        keys.check("Bearer first")
    file.unlink()
    keys.check("Bearer third-key-changed")
    os.mkfifo(file)
    keys.check("Bearer third-key-changed")
    with pytest.raises(ValueError, match=f"--api-keys-file {file}: .*not a regular file"):
        ApiKeys(file)
    file.unlink()
    with pytest.raises(ValueError, match=f"--api-keys-file {file}: No such file"):
        ApiKeys(file)


@pytest.mark.parametrize("line", ["sk-a of alice", "sk-a # alice", "sk-a\tof\talice", "sk-a\u3000of\u3000alice"])
def test_a_key_has_at_most_a_name(tmp_path: Path, line: str, caplog: pytest.LogCaptureFixture) -> None:
    """As in the server's file of tokens."""
    file = tmp_path / "keys"
    file.write_text(f"# keys\n{line}\n")
    reason = f"--api-keys-file {file}: line 2 has 3 words: expected a key and at most a name"
    with pytest.raises(ValueError, match="line 2") as caught:
        ApiKeys(file)
    assert str(caught.value) == reason
    file.write_text("old its-name\n")
    keys = ApiKeys(file)
    file.write_text(f"# keys\n{line}\n")
    for _ in range(3):
        keys.check("Bearer old")
    assert caplog.messages == [f"{reason}; the keys stay as they were"]
    file.write_text("new-key\n")
    keys.check("Bearer new-key")
    file.write_text(f"# more keys\n{line}\n")
    keys.check("Bearer new-key")
    assert len(caplog.messages) == 2


def test_headers_of_one_connection_stay_there() -> None:
    headers = [(b"connection", b"close, X-Private"), (b"x-private", b"1"), (b"te", b"trailers"), (b"host", b"a"),
               (b"transfer-encoding", b"chunked"), (b"content-length", b"5"), (b"traceparent", b"00-1"),
               (b"x-twice", b"1"), (b"x-twice", b"2")]  # fmt: skip
    assert forwarded(headers) == [(b"traceparent", b"00-1"), (b"x-twice", b"1"), (b"x-twice", b"2")]


@pytest.mark.parametrize("path", ["/v1", "/v1/chat/completions", "/v1/v3", "/tokenize", "/v1/things/v1", "/score/"])
def test_paths_of_an_engine(path: str) -> None:
    assert refused_path(path, has_engine=True) is None
    error = refused_path(path, has_engine=False)
    assert error
    assert (error.status, error.code) == (404, "no_engine")
    assert error.message.startswith(f"{path} needs an engine, and there is none here, only /v1/embeddings (")


@pytest.mark.parametrize("path", ["/", "", "/embeddings", "/v1x", "/v1/../score", "/v1/v1/messages", "/v1/v2/embed"])
def test_unknown_paths(path: str) -> None:
    beside, alone = (refused_path(path, has_engine=each) for each in (True, False))
    assert beside
    assert alone
    assert (beside.status, beside.code) == (alone.status, alone.code) == (404, "unknown_path")
    is_doubled = path.startswith("/v1/v")
    reason = ": the client's base URL has one /v1 too many" if is_doubled else ""
    assert beside.message == f"there is no path {path}{reason}"
    routes = "/v1/embeddings (base URL with /v1), /v2/embed (base URL without /v1) and /v1/models"
    assert alone.message == f"there is no path {path}, only {routes}"


@pytest.mark.parametrize(
    "path", ["/v1/messages", "/v1/messages/count_tokens", "/v1/responses/", "/v1/responses/r1/cancel", "//v1//messages"]
)
@pytest.mark.parametrize("has_engine", [False, True])
def test_messages_and_responses_are_for_the_engine(path: str, has_engine: bool) -> None:
    error = refused_path(path, has_engine=has_engine)
    assert error
    assert (error.status, error.code) == (404, "unsupported_api")
    assert "chat completions and embeddings; vLLM's own server takes messages" in error.message
    assert refused_path("/v1/messages2", has_engine=True) is None


@pytest.mark.parametrize("path", ["/v1/embedding", "/v1/embed"])
def test_misspelt_paths_of_embeddings(path: str) -> None:
    error = refused_path(path, has_engine=False)
    assert error
    assert (error.code, "only /v1/embeddings (base URL with /v1)" in error.message) == ("unknown_path", True)
    assert refused_path(path, has_engine=True) is None


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"engine_url": "vllm:8000"}, "--engine-url"),
        ({"engine_url": "http://vllm:8000/v1/"}, "--engine-url"),
        ({"engine_url": "http://["}, "--engine-url"),
        ({"engine_url": "http://vllm:99999"}, "--engine-url"),
        ({"engine_url": "http://user:secret@vllm"}, "--engine-url"),
        ({"engine_url": "http://:8000"}, "--engine-url"),
        ({"engine_health_path": "health"}, "--engine-health-path"),
        ({"engine_health_path": "/a b"}, "--engine-health-path"),
        ({"max_image_bytes": 2 << 30}, "--max-image-bytes"),
        ({"no_engine": True, "mode": "reference"}, "--mode needs an engine"),
        ({"no_engine": True, "engine_api_key_file": Path("k")}, "--engine-api-key-file needs an engine"),
        ({"no_engine": True, "on_encoder_failure": "engine"}, "--on-encoder-failure engine needs an engine"),
    ],
)
def test_bad_settings(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        RouterSettings(**values)


def test_every_flag_is_an_environment_variable() -> None:
    flags = CliRunner().invoke(app, ["router", "--help"], env={"COLUMNS": "400", "TERMINAL_WIDTH": "400"}).output
    for setting in fields(RouterSettings):
        assert f"--{setting.name.replace('_', '-')}" in flags
        assert f"VITWIRE_ROUTER_{setting.name.upper()}" in flags
    assert "--no-no-" not in flags


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--engine-url=vllm"], "--engine-url"),
        (["--allow-image-host=http://x"], "--allow-image-host"),
        (["--allow-image-network=x"], "--allow-image-network"),
        (["--api-keys-file=/nowhere"], "--api-keys-file /nowhere: No such file or directory"),
        (["--engine-api-key-file=/nowhere"], "--engine-api-key-file /nowhere: No such file or directory"),
        (["--target=http://x"], "is a URL"),
        (["--ca=/nowhere"], "/nowhere"),
        ([f"--engine-ca={__file__}"], f"--engine-ca {__file__}: no certificates in PEM"),
        (["--engine-ca=/nowhere"], "--engine-ca /nowhere: No such file or directory"),
        (["--ca=/nowhere"], "--ca /nowhere: No such file or directory"),
        ([f"--ca={__file__}"], f"--ca {__file__}: no certificates in PEM"),
        (["--cert=/nowhere", f"--key={__file__}"], "--cert /nowhere: No such file or directory"),
        ([f"--cert={__file__}", "--key=/nowhere"], "--key /nowhere: No such file or directory"),
        ([f"--cert={__file__}", f"--key={__file__}"], f"--key {__file__}: not the certificate's unencrypted key"),
        (["--token=\n"], "the token has characters"),
    ],
)
def test_wrong_flags_end_it_with_a_line(flags: list[str], reason: str) -> None:
    done = CliRunner().invoke(app, ["router", "--port=0", *flags])
    assert (done.exit_code, len(done.stderr.splitlines())) == (1, 1)
    assert reason in done.stderr


def test_the_extra_is_named() -> None:
    main = "import sys; sys.modules['starlette'] = None; from vitwire_cli import main; main()"
    done = subprocess.run([sys.executable, "-c", main, "router"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        1,
        "vitwire: starlette is not installed; in a checkout of Vitwire: pip install '.[router]'\n",
    )


def test_a_taken_port_and_a_misspelt_variable_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITWIRE_ROUTER_MAX_IMAGE", "3")
    monkeypatch.setenv("VITWIRE_ROUTER_MAX_IMAGES", "3")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = CliRunner().invoke(app, ["router", f"--port={port}"])
    assert done.exit_code == 1
    ignored, *_, last = done.stderr.splitlines()
    assert (
        ignored
        == "vitwire: ignored: VITWIRE_ROUTER_MAX_IMAGE is not a setting; did you mean VITWIRE_ROUTER_MAX_IMAGES?"
    )
    assert last.startswith(f"vitwire: --host 127.0.0.1 --port {port}: cannot listen: Address already in use")
