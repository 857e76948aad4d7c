"""Bodies of requests: JSON, forms, data URIs."""

import json

import pytest

from vitwire_gateway.api_errors import ApiError
from vitwire_gateway.bodies import parse
from vitwire_gateway.requests.image_refs import ImageRef
from vitwire_gateway.requests.image_sources import Limits, decode_data_uri, images_in


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
        ("data:image/png;base64,QUJD\nQUJD", "has line breaks"),
        ("data:image/png;base64,QQ%3D%3D", "has percent escapes"),
        ("file:///etc/passwd", "is a file: URL"),
        ("/tmp/photo.png", "is a path or a name"),
        ("A" * 9000, "is base64 without its head"),
        ("data:image/png;base64,ÄÄÄÄ", "invalid_base64"),
        ("data:image/png,QUJD", "invalid_image_url"),
        ("data:image/png;base64", "invalid_image_url"),
        ("data:image/png;base64," + "QUJD" * 100, "image_too_large"),
    ],
)
def test_bad_data_uris(url: str, code: str) -> None:
    (source,) = images_in([ImageRef(("images", 0), url)], Limits(1, 100)).sources
    assert isinstance(source.content, ApiError)
    assert code in f"{source.content.code}: {source.content}"


def test_data_uris() -> None:
    assert decode_data_uri("data:image/png;base64,QUJD", 3, "p") == b"ABC"
    assert decode_data_uri("DATA:video/mp4;codecs=vp8,opus;BASE64,QQ==", 3, "p") == b"A"


def test_integers_are_bounded() -> None:
    assert parse(b'{"seed": -%d}' % 10**398)["seed"] == -(10**398)
    with pytest.raises(ApiError, match="an integer of 401 digits, the limit is 400"):
        parse(b'{"seed": %d}' % 10**400)
