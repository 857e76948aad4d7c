"""Connections of callers to the router: uvicorn's over real sockets."""

import asyncio
import socket

import uvicorn
from starlette.responses import PlainTextResponse

from vitwire_gateway.listening import limited_to

SECONDS = 30


def test_pieces_of_a_response_wait_for_no_acknowledgement() -> None:
    """Callers may acknowledge a piece 40 ms later: tokens until then arrived together after it."""
    options: list[int] = []

    class Connection(limited_to(SECONDS)):  # a base that a function returned
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            found = transport.get_extra_info("socket")
            options.append(found.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    async def answered(listener: socket.socket) -> bytes:
        config = uvicorn.Config(PlainTextResponse("done"), http=Connection, lifespan="off", log_config=None)
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve([listener]))
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), SECONDS)
        writer.close()
        await writer.wait_closed()
        server.should_exit = True
        await serving
        return answer

    with socket.create_server(("127.0.0.1", 0)) as listener:  # as the router's
        assert asyncio.run(answered(listener)).startswith(b"HTTP/1.1 200")
    (no_delay,) = options
    assert no_delay
