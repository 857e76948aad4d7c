"""What both commands answer: connections that waste time, and errors of the encoder."""

import h11
import pytest

from vitwire import EncodeFailed, InvalidItem, NotCached, Overloaded, Unauthenticated, Unavailable, VitwireError
from vitwire.errors import DeadlineExceeded
from vitwire_gateway.api_errors import from_encoder
from vitwire_gateway.listening import Parser


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
    mapped = from_encoder(error, "messages[0].content[0].image_url", "no token")
    assert (mapped.status, mapped.code) == (status, code)
    assert (mapped.message == "no token") == (code == "encoder_refused")
    assert mapped.headers == ({"retry-after": "3"} if status == 429 else {})


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
