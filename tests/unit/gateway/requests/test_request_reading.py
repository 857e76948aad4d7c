"""Bodies of requests: JSON, forms, data URIs."""

import json

import pytest

from vitwire_gateway.api_errors import ApiError
from vitwire_gateway.bodies import parse
from vitwire_gateway.requests.image_sources import decode_data_uri, upload
from vitwire_gateway.requests.multipart_forms import opened


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"a": NaN}', b"\xff", b'"x"', b"[" * 100_000, b'{"a":' * 100_000])
def test_invalid_json(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_values_are_bounded_before_they_are_read() -> None:
    """64 MiB of empty objects would take 2 GB and block the event loop for seconds."""
    with pytest.raises(ApiError, match="more than 1000000 values"):
        parse(b'{"messages":[' + b"{}," * 500_000 + b"{}]}")
    parse(json.dumps({"url": "data:image/png;base64," + "A" * 10_000_000}).encode())


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


def form(*fields: tuple[str, str | None, bytes]) -> tuple[bytes, str]:
    body = b""
    for name, filename, content in fields:
        file = f'; filename="{filename}"' if filename else ""
        body += f'--B\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'.encode() + content + b"\r\n"
    return body + b"--B--\r\n", "multipart/form-data; boundary=B"


def test_forms() -> None:
    big = bytes(range(256)) * 8192
    body, kind = form(("request", None, b"{}"), ("cat", "c.jpg", big))
    request, files = opened(body, kind, 4)
    assert (request, files) == (b"{}", {"cat": big})
    assert upload("upload:cat", files, "p") == big
    with pytest.raises(ApiError, match="no uploaded file 'dog'"):
        upload("upload:dog", files, "p")
    assert opened(*form(("request", "r.json", b"{}")), 0) == (b"{}", {})


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
        opened(*form(*fields), 4)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "body", [b"", b"--B", b"garbage", b"--B\r\n\r\n\r\n--B--", b"--B\r\nContent-Disp\xff: \r\n\r\n"]
)
@pytest.mark.parametrize("kind", ["multipart/form-data; boundary=B", "multipart/form-data"])
def test_broken_forms(body: bytes, kind: str) -> None:
    with pytest.raises(ApiError) as caught:
        opened(body, kind, 4)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "charset", ["punycode", "undefined", "idna", "utf-7", "utf-16", "zip", "no-such", '"latin-1"', ""]
)
def test_forms_are_in_utf8_only(charset: str) -> None:
    """Of Python's codecs, some take the square of the length, and some fail."""
    body, kind = form(("request", None, b"{}"))
    with pytest.raises(ApiError, match="is not supported, send utf-8") as caught:
        opened(body, f"{kind}; charset={charset}", 4)
    assert (caught.value.status, caught.value.code) == (400, "invalid_form")
    for accepted in ("utf-8", "UTF8", '"utf-8"'):
        assert opened(body, f"{kind}; charset={accepted}", 4)[0] == b"{}"


def test_integers_are_bounded() -> None:
    assert parse(b'{"seed": -%d}' % 10**398)["seed"] == -(10**398)
    with pytest.raises(ApiError, match="an integer of 401 digits, the limit is 400"):
        parse(b'{"seed": %d}' % 10**400)
