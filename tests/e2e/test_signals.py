"""Signals: which ones drain, what a terminal that closes does, and what a drain leaves in the log."""

import os
import signal
import struct
import sys
import threading
from contextlib import ExitStack, suppress

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from checkpoints import Checkpoints
from http2 import DATA, END_HEADERS, END_STREAM, HEADERS, PING, SETTINGS, call_headers, connected, framed, frames
from processes import channel_to, edges
from servers import PIXELS_ONLY, serving

DEFAULT = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
"""The tests may run under `nohup`."""
MAIN = "from vitwire_server.__main__ import main; main()"
EDGES = pytest.mark.skipif(sys.platform != "linux", reason="edges need Linux")
SHAPES = pytest.mark.parametrize(
    "flags",
    [
        (),
        pytest.param(("--rpc-processes", "2"), marks=EDGES),
        pytest.param(("--devices", "cpu,cpu"), marks=pytest.mark.matrix),
    ],
    ids=" ".join,
)


@SHAPES
def test_sighup_drains(flags: tuple[str, ...], checkpoints: Checkpoints) -> None:
    """A terminal that closes may send it more than once, and to every process of a session."""
    program = ("-c", DEFAULT + MAIN)
    lame = ("--lame-duck-seconds", "2")
    with serving(checkpoints("qwen2_vl"), *PIXELS_ONLY, *flags, *lame, program=program, wait=False) as server:
        server.wait_for("ready: ")
        server.process.send_signal(signal.SIGHUP)
        server.wait_for("draining")
        for edge in edges(server):
            edge.send_signal(signal.SIGHUP)
        server.process.send_signal(signal.SIGHUP)
        assert server.process.wait(60) == 0
        assert "Traceback" not in server.log()
        assert "exited unexpectedly" not in server.log()


@SHAPES
def test_after_ctrl_c_nobody_waits(flags: tuple[str, ...], checkpoints: Checkpoints) -> None:
    with serving(checkpoints("qwen2_vl"), *PIXELS_ONLY, *flags, "--lame-duck-seconds", "3600", wait=False) as server:
        server.wait_for("ready: ")
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(60) == 0
        assert "serving for another 0 s" in server.log()


def test_nohup_keeps_a_server_running(checkpoints: Checkpoints) -> None:
    program = ("-c", "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + MAIN)
    with serving(checkpoints("qwen2_vl"), *PIXELS_ONLY, program=program) as server:
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
    with serving(checkpoints("qwen2_vl"), *PIXELS_ONLY, program=("-c", DEFAULT + in_terminal + MAIN)) as server:
        os.close(theirs)
        os.close(ours)
        assert server.process.wait(60) == 0
        assert "draining" in server.log()


@pytest.mark.parametrize("processes", ["1", pytest.param("2", marks=EDGES)])
def test_watchers_of_health_leave_no_traceback(processes: str, checkpoints: Checkpoints) -> None:
    with ExitStack() as stack, serving(checkpoints("qwen2_vl"), *PIXELS_ONLY, "--rpc-processes", processes) as server:
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


class Silent:
    """A watcher of health that allows its answer no bytes, and answers pings as a living client does."""

    def __init__(self, target: str) -> None:
        self._socket = connected(target, 60)
        nothing = framed(SETTINGS, 0, 0, struct.pack(">HI", 4, 0))
        call = framed(HEADERS, END_HEADERS, 1, call_headers("/grpc.health.v1.Health/Watch"))
        self._socket.sendall(nothing + call + framed(DATA, END_STREAM, 1, bytes(5)))
        self.answered = threading.Event()
        """The call has headers: the server is about to write."""
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with suppress(OSError), self._socket:
            for kind, flags, _, payload in frames(self._socket):
                if kind == HEADERS:
                    self.answered.set()
                elif kind in (SETTINGS, PING) and not flags & 1:
                    self._socket.sendall(framed(kind, 1, 0, payload if kind == PING else b""))


def test_watchers_that_do_not_read_hold_nothing_up(checkpoints: Checkpoints) -> None:
    """Neither the drain nor other watchers."""
    with serving(checkpoints("qwen2_vl"), *PIXELS_ONLY) as server, grpc.insecure_channel(server.target) as channel:
        silent = [Silent(server.target) for _ in range(4)]
        assert all(each.answered.wait(60) for each in silent)
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        server.process.terminate()
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert server.process.wait(60) == 0
