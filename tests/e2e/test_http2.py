"""What one connection can do to the callers of others, by frames that no gRPC client sends."""

import threading
from struct import unpack

import grpc

import load
from entered import entered
from http2 import SETTINGS, connected, flood, frames
from servers import PIXELS_ONLY, ServerProcess, serving
from vitwire.v1.encoder_pb2_grpc import EncoderServiceStub

MAX_CONCURRENT_STREAMS = 3
"""Identifier of a setting."""
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)
RESETS = 40_000
AT_A_TIME = 900


server = entered(
    lambda checkpoints, request: serving(checkpoints("qwen2_vl"), *PIXELS_ONLY, "--rpc-processes", request.param),
    params=["1", "2"],
)


def test_a_flood_of_resets_ends_no_call_of_another_connection(server: ServerProcess) -> None:
    """gRPC ended calls of everybody with CANCELLED once a thousand waited for a handler."""
    attack, answered = threading.Thread(target=flood, args=(server.target, RESETS)), 0
    with grpc.insecure_channel(server.target, OWN_CONNECTION) as channel:
        stub = EncoderServiceStub(channel)
        list(stub.Encode(load.request(load.image()), timeout=60))
        attack.start()
        while attack.is_alive() or answered < 3:
            list(stub.Encode(load.request(load.image()), timeout=60))
            answered += 1
    attack.join()
    assert server.process.poll() is None


def settings(target: str) -> dict[int, int]:
    with connected(target) as connection:
        payload = next(payload for kind, flags, _, payload in frames(connection) if kind == SETTINGS and not flags)
    return dict(unpack(">HI", payload[at : at + 6]) for at in range(0, len(payload), 6))


def test_a_server_bounds_the_calls_of_a_connection(server: ServerProcess) -> None:
    assert settings(server.target)[MAX_CONCURRENT_STREAMS] == AT_A_TIME
