"""Signals: which ones drain, what a terminal that closes does, and what a drain leaves in the log."""

import os
import signal
import sys
from contextlib import ExitStack

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from checkpoints import Checkpoints
from processes import channel_to, edges
from servers import serving

DEFAULT = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
"""The tests may run under `nohup`."""
MAIN = "from vitwire_server.__main__ import main; main()"
EDGES = pytest.mark.skipif(sys.platform != "linux", reason="edges need Linux")
SHAPES = pytest.mark.parametrize(
    "flags", [(), pytest.param(("--rpc-processes", "2"), marks=EDGES), ("--devices", "cpu,cpu")], ids=" ".join
)


@SHAPES
def test_sighup_drains(flags: tuple[str, ...], checkpoints: Checkpoints) -> None:
    """A terminal that closes may send it more than once, and to every process of a session."""
    program = ("-c", DEFAULT + MAIN)
    lame = ("--lame-duck-seconds", "2")
    with serving(checkpoints("qwen2_vl"), *flags, *lame, program=program, wait=False) as server:
        server.wait_for("ready: ")
        server.process.send_signal(signal.SIGHUP)
        server.wait_for("draining")
        for edge in edges(server):
            edge.send_signal(signal.SIGHUP)
        server.process.send_signal(signal.SIGHUP)
        assert server.process.wait(60) == 0
        assert "Traceback" not in server.log()
        assert "exited unexpectedly" not in server.log()


def test_nohup_keeps_a_server_running(checkpoints: Checkpoints) -> None:
    program = ("-c", "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + MAIN)
    with serving(checkpoints("qwen2_vl"), program=program) as server:
        server.process.send_signal(signal.SIGHUP)
        assert server.page("/healthz")[0] == 200
        assert server.stop() == 0
        assert server.log().count("draining") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="terminals as Linux has them")
def test_a_server_drains_when_its_terminal_closes(checkpoints: Checkpoints) -> None:
    ours, theirs = os.openpty()
    in_terminal = (
        f"import fcntl, os, termios\nos.setsid()\nterminal = os.open({os.ttyname(theirs)!r}, os.O_RDWR)\n"
        "fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)\n"
    )
    with serving(checkpoints("qwen2_vl"), program=("-c", DEFAULT + in_terminal + MAIN)) as server:
        os.close(theirs)
        os.close(ours)
        assert server.process.wait(60) == 0
        assert "draining" in server.log()


@pytest.mark.parametrize("processes", ["1", pytest.param("2", marks=EDGES)])
def test_watchers_of_health_leave_no_traceback(processes: str, checkpoints: Checkpoints) -> None:
    with ExitStack() as stack, serving(checkpoints("qwen2_vl"), "--rpc-processes", processes) as server:
        if processes == "2":
            channels = [stack.enter_context(channel_to(server, edge)) for edge in edges(server)]
        else:
            channels = [stack.enter_context(grpc.insecure_channel(server.target))]
        watches = [
            health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)
            for channel in channels
            for _ in range(3)
        ]
        for watch in watches:
            assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        assert server.stop() == 0
        for watch in watches:
            with pytest.raises(grpc.RpcError) as ended:
                list(watch)
            assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "ERROR" not in server.log()
        assert "Traceback" not in server.log()
