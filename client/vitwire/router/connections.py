"""A connection of a caller: uvicorn's, with errors in OpenAI's form and without callers that never read."""

import asyncio
import socket

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from vitwire.router.errors import ApiError

_MALFORMED = ApiError(400, "the request is not valid HTTP/1.1", "invalid_http", headers={"connection": "close"})


def limited_to(stall_seconds: float) -> type[H11Protocol]:
    """The class of connections that end when the caller takes nothing for this long."""

    class Connection(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as the base
            super().connection_made(transport)
            found = transport.get_extra_info("socket")
            # Closing waits until all is sent, which for such a caller only the kernel ends. Linux has the option.
            if found is not None and found.family != socket.AF_UNIX and hasattr(socket, "TCP_USER_TIMEOUT"):
                found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(stall_seconds * 1000)))

        def send_400_response(self, msg: str) -> None:  # noqa: ARG002  # the base's signature
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                headers = {"content-type": "application/json", **_MALFORMED.headers}
                for event in (
                    h11.Response(status_code=_MALFORMED.status, headers=list(headers.items()), reason=b"Bad Request"),
                    h11.Data(data=_MALFORMED.body),
                    h11.EndOfMessage(),
                ):
                    self.transport.write(self.conn.send(event) or b"")
            self.transport.close()

    return Connection
