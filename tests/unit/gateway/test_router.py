"""Parts of the router that need no network: rewriting, errors, forms, keys, addresses, settings."""

import ipaddress
import json
import os
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import h11
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from vitwire import EncodeFailed, InvalidItem, NotCached, Overloaded, Unauthenticated, Unavailable, VitwireError
from vitwire.cli._app import app
from vitwire.errors import DeadlineExceeded
from vitwire.integrations.vllm.tensors import TorchFile, torch_base64
from vitwire_gateway.openai.addresses import AllowedHost, is_permitted, parse_networks
from vitwire_gateway.openai.connections import Parser
from vitwire_gateway.openai.errors import ApiError, from_encoder
from vitwire_gateway.openai.keys import ApiKeys
from vitwire_gateway.openai.rewriting import Hole, cut, filled, images_of, parse
from vitwire_gateway.openai.settings import Settings
from vitwire_gateway.openai.uploads import decode_data_uri, parse_form, upload
from vitwire_gateway.openai.upstream import forwarded


def chat(*parts: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": list(parts)}]}


def image(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": url}


def rewritten(request: Any, *parts: dict[str, Any], hole: Hole = "part") -> Any:
    return json.loads(b"".join(filled(cut(request, images_of(request), hole), parts)))


def test_rows_are_encoded_as_the_request_is_sent() -> None:
    first, second = (np.full((3, 1 << 18), value, "<u2") for value in (1, 2))
    request = chat(image("data:x"), {"type": "text", "text": "t"}, image("data:y"))
    files = [TorchFile(each, "bfloat16") for each in (first, second)]
    parts = [{"type": "image_embeds", "image_embeds": {"rows": file, "n": [1, 2]}, "uuid": "u"} for file in files]
    body = filled(cut(request, images_of(request), "part"), parts)
    assert body.held < 1 << 10 < 1 << 20 < len(body)
    sent = list(body)
    assert (max(map(len, sent)) <= 1 << 19, sum(map(len, sent))) == (True, len(body))
    content = json.loads(b"".join(sent))["messages"][1]["content"]
    assert [content[at]["image_embeds"]["rows"] for at in (0, 2)] == [
        torch_base64(each, "bfloat16") for each in (first, second)
    ]
    assert content[2]["image_embeds"]["n"] == [1, 2]
    assert b"".join(body) == b"".join(sent)  # a request that is sent again


@pytest.mark.parametrize(
    "part",
    [
        image({"url": "data:x", "detail": "low"}),
        image("data:x"),
        {"type": "input_image", "image_url": "data:x"},
        {"image_url": {"url": "data:x"}},
        {"type": "text", "image_url": "data:x", "uuid": "u"},  # vLLM reads it as an image
    ],
)
def test_images_are_found_in_every_form(part: dict[str, Any]) -> None:
    (ref,) = images_of(chat({"type": "text", "text": "t"}, part))
    assert (ref.url, ref.param) == ("data:x", "messages[1].content[1].image_url")


@pytest.mark.parametrize(
    ("part", "param", "reason"),
    [
        (image({}), "messages[1].content[0].image_url.url", "string"),
        (image({"url": 5}), "messages[1].content[0].image_url.url", "string"),
        (image({"url": ""}), "messages[1].content[0].image_url.url", "string"),
        (image(None), "messages[1].content[0].image_url", "nothing"),
        (image([]), "messages[1].content[0].image_url", "list"),
        ({"type": "image_url"}, "messages[1].content[0].image_url", "nothing"),
        ({"image_url": None, "uuid": "cached"}, "messages[1].content[0].image_url", "nothing"),
    ],
)
def test_malformed_parts_are_named(part: dict[str, Any], param: str, reason: str) -> None:
    with pytest.raises(ApiError, match=reason) as caught:
        images_of(chat(part))
    assert (caught.value.status, caught.value.param) == (400, param)
    assert json.loads(caught.value.body)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "request_", [{}, {"messages": "x"}, {"messages": [1, {"content": "x"}, {"content": [1, "x", {"type": "text"}]}]}]
)
def test_what_is_no_image_is_left_to_the_engine(request_: dict[str, Any]) -> None:
    assert images_of(request_) == []


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"a": NaN}', b"\xff", b'"x"', b"[" * 100_000, b'{"a":' * 100_000])
def test_invalid_json(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_values_are_bounded_before_they_are_read() -> None:
    """64 MiB of empty objects would take 2 GB and block the event loop for seconds."""
    with pytest.raises(ApiError, match="more than 1000000 values"):
        parse(b'{"messages":[' + b"{}," * 500_000 + b"{}]}")
    parse(json.dumps(chat(image("data:image/png;base64," + "A" * 10_000_000))).encode())


def test_all_else_is_kept() -> None:
    original = chat({"type": "text", "text": "ü\ud800"}, image({"url": "data:x"}) | {"cache_control": 1, "uuid": "u"})
    original |= {"seed": 2**70, "n": 0.1, "x": {"y": [None, True]}}
    request = parse(json.dumps(original).encode())
    (ref,) = images_of(request)
    changed = rewritten(request, {"type": "image_embeds", "image_embeds": "E", "uuid": "mine"})
    expected = json.loads(json.dumps(original))
    expected["messages"][1]["content"][1] = {
        "cache_control": 1, "type": "image_embeds", "image_embeds": "E", "uuid": "mine",
    }  # fmt: skip
    assert changed == expected
    assert images_of(request) == [ref], "the request itself stays as it is"


def test_fields_of_the_image_stay_where_it_passes_on() -> None:
    request = chat(image({"url": "upload:a", "detail": "low"}))
    changed = rewritten(request, {"url": "data:x"}, hole="image")
    assert changed["messages"][1]["content"] == [image({"url": "data:x", "detail": "low"})]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["messages", "content", "type", "image_url", "url", "uuid", "x"]), inner)
    ),
    max_leaves=30,
)


@settings(max_examples=40)
@given(JSON, JSON)
def test_any_json_is_refused_or_kept(content: Any, other: Any) -> None:
    request = parse(json.dumps({"messages": [other, {"content": content}], "other": other}).encode())
    try:
        refs = images_of(request)
    except ApiError as error:
        assert (error.status, error.param is not None) == (400, True)
        return
    if refs:
        assert images_of(rewritten(request, *({"type": "embeds"} for _ in refs))) == []


def test_numbers_that_json_has_not() -> None:
    request = parse(json.dumps(chat(image("data:x"))).replace('"m"', "1e999").encode())
    with pytest.raises(ApiError, match="cannot be sent"):
        rewritten(request, {})


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvalidItem("bad"), 400, "invalid_image"),
        (Overloaded("full", retry_after=2.5), 429, "encoder_overloaded"),
        (DeadlineExceeded("late"), 504, "encoder_timeout"),
        (Unavailable("gone"), 503, "encoder_unavailable"),
        (Unauthenticated("no"), 502, "encoder_refused"),
        (EncodeFailed("nan"), 502, "encoder_failed"),
        (NotCached("no"), 502, "encoder_failed"),
    ],
)
def test_errors_of_the_encoder(error: VitwireError, status: int, code: str) -> None:
    mapped = from_encoder(error, "messages[0].content[0].image_url")
    assert (mapped.status, mapped.code) == (status, code)
    assert mapped.headers == ({"retry-after": "3"} if status == 429 else {})


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("data:image/png;base64,%%%%", "invalid_base64"),
        ("data:image/png;base64,QUJ", "invalid_base64"),
        ("data:image/png;base64,QUJD QUJD", "invalid_base64"),
        ("data:image/png;base64,ÄÄÄÄ", "invalid_base64"),
        ("data:image/png,QUJD", "invalid_image_url"),
        ("data:image/png;base64", "invalid_image_url"),
        ("data:image/png;base64," + "QUJD" * 100, "image_too_large"),
    ],
)
def test_bad_data_uris(url: str, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        decode_data_uri(url, 100, "p")
    assert caught.value.code == code


def test_data_uris() -> None:
    assert decode_data_uri("data:image/png;base64,QUJD", 3, "p") == b"ABC"
    assert decode_data_uri("DATA:;charset=x;BASE64,QQ==", 3, "p") == b"A"


def form(*fields: tuple[str, str | None, bytes]) -> tuple[str, bytes]:
    body = b""
    for name, filename, content in fields:
        file = f'; filename="{filename}"' if filename else ""
        body += f'--B\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'.encode() + content + b"\r\n"
    return "multipart/form-data; boundary=B", body + b"--B--\r\n"


def test_forms() -> None:
    big = bytes(range(256)) * 8192
    kind, body = form(("request", None, b"{}"), ("cat", "c.jpg", big))
    request, files = parse_form(kind, body, 4)
    assert (request, files) == (b"{}", {"cat": big})
    assert upload("upload:cat", files, "p") == big
    with pytest.raises(ApiError, match="no uploaded file 'dog'"):
        upload("upload:dog", files, "p")
    assert parse_form(*form(("request", "r.json", b"{}")), 0) == (b"{}", {})


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ([("cat", "c", b"x")], "no field 'request'"),
        ([("request", None, b"{}"), ("other", None, b"x")], "Too many fields"),
        ([("other", None, b"x")], "unknown field"),
        ([("request", "r", b"{}"), ("a", "1", b"x"), ("a", "2", b"y")], "twice"),
        ([("request", "r", b"{}"), ("request", None, b"{}")], "twice"),
        ([("request", None, b"{}"), *((each, "f", b"x") for each in "abcdefghi")], "Too many files"),
    ],
)
def test_bad_forms(fields: list[tuple[str, str | None, bytes]], reason: str) -> None:
    with pytest.raises(ApiError, match=reason) as caught:
        parse_form(*form(*fields), 4)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "body", [b"", b"--B", b"garbage", b"--B\r\n\r\n\r\n--B--", b"--B\r\nContent-Disp\xff: \r\n\r\n"]
)
@pytest.mark.parametrize("kind", ["multipart/form-data; boundary=B", "multipart/form-data"])
def test_broken_forms(body: bytes, kind: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_form(kind, body, 4)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "charset", ["punycode", "undefined", "idna", "utf-7", "utf-16", "zip", "no-such", '"latin-1"', ""]
)
def test_forms_are_in_utf8_only(charset: str) -> None:
    """Of Python's codecs, some take the square of the length, and some fail."""
    kind, body = form(("request", None, b"{}"))
    with pytest.raises(ApiError, match="is not supported, send utf-8") as caught:
        parse_form(f"{kind}; charset={charset}", body, 4)
    assert (caught.value.status, caught.value.code) == (400, "invalid_form")
    for accepted in ("utf-8", "UTF8", '"utf-8"'):
        assert parse_form(f"{kind}; charset={accepted}", body, 4)[0] == b"{}"


def test_integers_are_bounded() -> None:
    assert parse(b'{"seed": -%d}' % 10**398)["seed"] == -(10**398)
    with pytest.raises(ApiError, match="an integer of 401 digits, the limit is 400"):
        parse(b'{"seed": %d}' % 10**400)


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
    file.write_text("third key changed\n")
    keys.check("Bearer third key changed")
    with pytest.raises(ApiError):
        keys.check("Bearer first")
    file.unlink()
    keys.check("Bearer third key changed")
    os.mkfifo(file)
    keys.check("Bearer third key changed")
    with pytest.raises(OSError, match="not a regular file"):
        ApiKeys(file)
    file.unlink()
    with pytest.raises(FileNotFoundError):
        ApiKeys(file)


@pytest.mark.parametrize(
    ("entry", "host", "port", "matches"),
    [
        ("images.example.org", "IMAGES.example.org.", 443, True),
        ("images.example.org", "images.example.org", 80, True),
        ("images.example.org", "images.example.org", 8080, False),
        ("images.example.org:8080", "images.example.org", 8080, True),
        ("images.example.org:8080", "images.example.org", 443, False),
        ("images.example.org", "x.images.example.org", 443, False),
        ("*.example.org", "x.example.org", 443, True),
        ("*.example.org", "example.org", 443, False),
        ("*.example.org", "evilexample.org", 443, False),
        ("[::1]:80", "::1", 80, True),
    ],
)
def test_allowed_hosts(entry: str, host: str, port: int, matches: bool) -> None:
    assert AllowedHost.parse(entry).matches(host, port) is matches


@pytest.mark.parametrize(
    "entry", ["", "*", "*.", "http://x", "x/y", "x:0", "x:http", "x:70000", "a@b", "x.*.org", "[::1"]
)
def test_bad_allowed_hosts(entry: str) -> None:
    with pytest.raises(ValueError, match="--allow-image-host"):
        AllowedHost.parse(entry)


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.1.1",
     "255.255.255.255", "240.0.0.1", "198.18.0.1", "::", "::1", "fe80::1", "fc00::1", "fec0::1", "ff02::1", "ff0e::1",
     "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::1", "2002:7f00:1::",
     "2001:0:4136:e378:8000:63bf:80ff:fffe", "2001:db8::1", "100::1"],
)  # fmt: skip
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_permitted(ipaddress.ip_address(address), ())


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "151.101.1.69", "2606:4700::1111", "2a00:1450:4001::1", "::ffff:8.8.8.8"]
)
def test_public_addresses(address: str) -> None:
    assert is_permitted(ipaddress.ip_address(address), ())


def test_networks_that_are_allowed() -> None:
    networks = parse_networks(["10.8.0.0/16", "fd00::/8"])
    for address, permitted in [("10.8.1.2", True), ("10.9.1.2", False), ("fd12::1", True), ("::ffff:10.8.0.1", True)]:
        assert is_permitted(ipaddress.ip_address(address), networks) is permitted
    with pytest.raises(ValueError, match="--allow-image-network"):
        parse_networks(["10.8.0.1/16"])


def test_headers_of_one_connection_stay_there() -> None:
    headers = [(b"connection", b"close, X-Private"), (b"x-private", b"1"), (b"te", b"trailers"), (b"host", b"a"),
               (b"transfer-encoding", b"chunked"), (b"content-length", b"5"), (b"traceparent", b"00-1"),
               (b"x-twice", b"1"), (b"x-twice", b"2")]  # fmt: skip
    assert forwarded(headers) == [(b"traceparent", b"00-1"), (b"x-twice", b"1"), (b"x-twice", b"2")]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"engine_url": "vllm:8000"}, "--engine-url"),
        ({"engine_url": "http://vllm:8000/v1/"}, "--engine-url"),
        ({"engine_url": "http://["}, "--engine-url"),
        ({"engine_url": "http://vllm:99999"}, "--engine-url"),
        ({"engine_url": "http://user:secret@vllm"}, "--engine-url"),
        ({"engine_url": "http://:8000"}, "--engine-url"),
        ({"cert": Path("c")}, "--cert"),
        ({"max_image_bytes": 2 << 30}, "--max-image-bytes"),
    ],
)
def test_bad_settings(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Settings(**values)


def test_every_flag_is_an_environment_variable() -> None:
    flags = CliRunner().invoke(app, ["router", "--help"], env={"COLUMNS": "400", "TERMINAL_WIDTH": "400"}).output
    for setting in fields(Settings):
        assert f"--{setting.name.replace('_', '-')}" in flags
        assert f"VITWIRE_ROUTER_{setting.name.upper()}" in flags


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--engine=sglang", "--mode=inline"], "--mode inline: SGLang"),
        (["--engine-url=vllm"], "--engine-url"),
        (["--allow-image-host=http://x"], "--allow-image-host"),
        (["--allow-image-network=x"], "--allow-image-network"),
        (["--api-keys-file=/nowhere"], "/nowhere"),
        (["--target=http://x"], "is a URL"),
        (["--ca=/nowhere"], "/nowhere"),
        (["--engine-ca=/nowhere"], "/nowhere"),
        ([f"--engine-ca={__file__}"], "no certificates in PEM"),
        (["--token=\n"], "the token has characters"),
    ],
)
def test_wrong_flags_end_it_with_a_line(flags: list[str], reason: str) -> None:
    done = CliRunner().invoke(app, ["router", "--port=0", *flags])
    assert (done.exit_code, len(done.stderr.splitlines())) == (1, 1)
    assert reason in done.stderr


def test_the_extra_is_named() -> None:
    main = "import sys; sys.modules['starlette'] = None; from vitwire.cli import main; main()"
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
    assert ignored == "vitwire: ignored: VITWIRE_ROUTER_MAX_IMAGE is not a setting of the router"
    assert last.startswith(f"vitwire: --host 127.0.0.1 --port {port}: cannot listen: Address already in use")


def test_bodies_in_tiny_chunks_are_refused() -> None:
    """256 KiB of them kept the event loop for more than a second."""
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"

    def chunks_read(chunk: bytes, number: int) -> int:
        parser = Parser(h11.SERVER)
        parser.receive_data(head + (b"%x\r\n" % len(chunk) + chunk + b"\r\n") * number + b"0\r\n\r\n")
        assert isinstance(parser.next_event(), h11.Request)
        found = 0
        while isinstance(parser.next_event(), h11.Data):
            found += 1
        return found

    assert chunks_read(b"x", 256) == 256
    assert chunks_read(b"x" * 300, 5000) == 5000
    with pytest.raises(h11.RemoteProtocolError, match="too small"):
        chunks_read(b"x", 300)
