"""The bare gRPC server that services are compared with: it reads a call's messages and sends as many bytes as asked.

`python -m bench.echo --port 0` prints its port. It answers any method, and does nothing with what it reads. The sizes
of the messages of the answer are in the call's metadata, so the answer has the messages of the service it stands for.
"""

import argparse
import asyncio
import signal
from functools import cache
from typing import Any

import grpc
import grpc.aio

from vitwire.shared import allocator

ANSWER = "x-answer"
"""Metadata with the sizes of the answer's messages, separated by commas."""
UNLIMITED = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))


class Echo(grpc.GenericRpcHandler):
    """Every method is a stream in both directions of messages that are not parsed."""

    def service(self, handler_call_details: Any) -> "grpc.RpcMethodHandler[Any, Any]":  # noqa: ARG002
        return grpc.stream_stream_rpc_method_handler(self._answer)

    async def _answer(self, _: object, context: Any) -> None:
        while await context.read() is not grpc.aio.EOF:
            pass
        sizes = next((value for key, value in context.invocation_metadata() if key == ANSWER), "")
        for size in filter(None, sizes.split(",")):
            await context.write(_zeros(int(size)))


@cache
def _zeros(size: int) -> bytes:
    return bytes(bytearray(size))  # touched, where bytes(size) may be pages that are not there yet


async def serve(port: int, *, shared: bool) -> None:
    """Serve until SIGTERM; `shared` lets several processes listen on the port."""
    server = grpc.aio.server(options=(*UNLIMITED, ("grpc.so_reuseport", int(shared))))
    server.add_generic_rpc_handlers((Echo(),))
    print(server.add_insecure_port(f"127.0.0.1:{port}"), flush=True)
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    await server.start()
    await stopping.wait()
    await server.stop(0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser("echo", description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--shared", action="store_true", help="share the port with other processes (SO_REUSEPORT)")
    words = parser.parse_args()
    allocator.tune()  # as servers do
    asyncio.run(serve(words.port, shared=words.shared))
