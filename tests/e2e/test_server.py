"""The server process: health, reflection, start, drain, exit codes."""

import json
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from checkpoints import Checkpoints
from entered import entered
from metric_pages import durations
from servers import PIXELS_ONLY, ServerProcess, finished, serving
from vitwire import Client, EncodeFailed, Item, Unavailable

GRPCURL = Path(sys.executable).with_name("grpcurl")
SERVICE = "vitwire.v1.EncoderService"
SERVING, NOT_SERVING = (health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING)

server = entered(lambda checkpoints: serving(checkpoints("qwen2_vl"), "--graphs", "simulated", "--budgets", "16,64"))


def grpcurl(server: ServerProcess, *words: str) -> str:
    done = subprocess.run([GRPCURL, "-plaintext", server.target, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_reflection_describes(server: ServerProcess) -> None:
    """test_readme.py runs the README's calls through it."""
    assert {SERVICE, "grpc.health.v1.Health"} <= set(grpcurl(server, "list").split())
    described = grpcurl(server, "describe", SERVICE)
    assert all(f"rpc {method} (" in described for method in ("Encode", "EncodeStream", "GetModel"))
    assert "pixels = 15" in grpcurl(server, "describe", "vitwire.v1.Item")
    model = json.loads(grpcurl(server, f"{SERVICE}/GetModel"))
    assert [budget["tokens"] for budget in model["budgets"]] == [16, 64]
    assert (model["graphs"], model["attention_backend"], model["device"]) == ("simulated", "sdpa", "cpu")


@pytest.mark.parametrize(("words", "policy"), [((), "PASSIVE"), (("OMP_WAIT_POLICY=ACTIVE",), "ACTIVE")])
def test_threads_of_openmp_sleep_at_barriers_by_default(
    checkpoints: Checkpoints, words: tuple[str], policy: str
) -> None:
    """OpenMP, which reads it when torch is imported, prints what it found."""
    environment = ("env", "-u", "OMP_WAIT_POLICY", "OMP_DISPLAY_ENV=TRUE", *words)
    server = (sys.executable, "-m", "vitwire_server", "serve", "--model", str(checkpoints("qwen2_vl")))
    command = (*environment, *server, "--port", "0", "--metrics-port", "0", "--device", "cpu")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout
        try:
            printed = next(line for line in process.stdout if "OMP_WAIT_POLICY" in line or "ready: " in line)
        finally:
            process.kill()
    assert re.search(f"OMP_WAIT_POLICY ?= ?'{policy}'", printed)


def test_metrics_port(server: ServerProcess) -> None:
    assert server.page("/healthz") == server.page("/livez") == (200, "ok\n")
    status, text = server.page("/metrics")
    assert status == 200
    assert "vitwire_model_info{" in text
    assert durations(text) >= {f"vitwire_{name}_seconds" for name in ("stage", "delivery", "decode")}
    assert server.page("/elsewhere")[0] == 404
    assert server.metric("vitwire_graphs_captured") == 2
    beat = server.metric("vitwire_engine_heartbeat_timestamp_seconds")
    assert abs(time.time() - beat) < 10


@pytest.mark.parametrize("path", ["/", "/metrics", "/healthz", "/livez", "/elsewhere"])
def test_head_is_get_without_its_body(server: ServerProcess, path: str) -> None:
    def answer(method: str) -> tuple[str, str, str]:
        with socket.create_connection(("127.0.0.1", server.metrics_port), timeout=10) as raw:
            raw.sendall(f"{method} {path} HTTP/1.0\r\n\r\n".encode())
            with raw.makefile("rb") as stream:
                head, _, body = stream.read().decode().partition("\r\n\r\n")
        status, *headers = head.splitlines()
        return status, ", ".join(header.partition(":")[0] for header in headers), body

    (status, headers, body), (*same, nothing) = answer("GET"), answer("HEAD")
    assert same == [status, headers]
    assert "Content-Length" in headers
    assert body
    assert not nothing


def test_not_ready_while_loading_and_exit_on_sigterm(checkpoints: Checkpoints) -> None:
    """The port is open before the model is there, and health tells the two states apart."""
    slow = (
        "import time, vitwire_server.assembling.placing as l\n"
        "load = l.load_tower\n"
        "l.load_tower = lambda *a, **k: (time.sleep(60), load(*a, **k))[1]\n"
        "from vitwire_server.__main__ import main; main()"
    )
    with serving(checkpoints("qwen2_vl"), *PIXELS_ONLY, wait=False, program=("-c", slow)) as process:
        with grpc.insecure_channel(process.target) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            ready = health_pb2.HealthCheckRequest(service=SERVICE)
            alive = health_pb2.HealthCheckRequest(service="liveness")
            assert health.Check(ready, timeout=10).status == NOT_SERVING
            assert health.Check(alive, timeout=10).status == SERVING
            with pytest.raises(grpc.RpcError) as refused:
                channel.unary_unary(f"/{SERVICE}/GetModel")(b"", timeout=10)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert process.page("/healthz")[0] == 503
        assert "ready: " not in process.log(), "loading must outlast this test"
        assert process.stop() == 0


def test_sigterm_drains_without_losing_what_is_in_flight(checkpoints: Checkpoints) -> None:
    columns = 3 * 2 * 14 * 14
    items = [Item(np.ones((1024, columns), np.float32), (1, 32, 32))] * 8
    with serving(checkpoints("qwen2_vl"), *PIXELS_ONLY, "--lame-duck-seconds", "1", "--drain-seconds", "60") as process:

        def begun() -> float:
            ended = process.metric("vitwire_requests_total", method="EncodeStream")
            return process.metric("vitwire_inflight_requests") + ended

        with Client(process.target) as client, ThreadPoolExecutor(4) as pool:
            calls = [pool.submit(client.encode, items) for _ in range(4)]
            while begun() < 4:  # on a busy machine the last may begin seconds after the first
                time.sleep(0.01)
            with grpc.insecure_channel(process.target) as channel:
                watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
                assert next(watch).status == SERVING
                process.process.send_signal(signal.SIGTERM)
                assert next(watch).status == NOT_SERVING
                assert channel.unary_unary(f"/{SERVICE}/GetModel")(b"", timeout=10), "a lame duck still serves"
                watch.cancel()
            assert [len(call.result(60)) for call in calls] == [8] * 4
        assert process.process.wait(60) == 0


def test_second_signal_ends_at_once(checkpoints: Checkpoints) -> None:
    with serving(checkpoints("qwen2_vl"), *PIXELS_ONLY, "--lame-duck-seconds", "60") as process:
        process.process.terminate()
        process.wait_for("draining")
        time.sleep(0.7)
        process.process.terminate()
        assert process.process.wait(5) != 0
        assert "second signal" in process.log()


@pytest.mark.skipif(shutil.which("timeout") is None, reason="needs GNU timeout")
@pytest.mark.parametrize("flags", [(), pytest.param(("--devices", "cpu,cpu"), marks=pytest.mark.matrix)])
def test_a_signal_that_comes_twice_is_one(checkpoints: Checkpoints, flags: tuple[str, ...]) -> None:
    """GNU timeout signals its child, and then the group that the child is in."""
    wrapped = ("timeout", "120")
    with serving(
        checkpoints("qwen2_vl"), *PIXELS_ONLY, *flags, "--lame-duck-seconds", "1", wait=False, wrapper=wrapped
    ) as process:
        process.wait_for("ready: ")
        (inside,) = psutil.Process(process.process.pid).children()
        process.process.terminate()
        time.sleep(0.1)
        inside.terminate()  # where the kernel made one of those two
        assert process.process.wait(60) == 0
        assert "draining" in process.log()
        assert "second signal" not in process.log()


def test_a_dead_engine_ends_the_process(checkpoints: Checkpoints) -> None:
    """What is in flight is answered, and the exit code tells the supervisor."""
    broken = (
        "from vitwire_server.scheduling.scheduler import Scheduler\n"
        "def fail(*_): raise ZeroDivisionError('injected')\n"
        "Scheduler._execute = fail\n"
        "from vitwire_server.__main__ import main; main()"
    )
    item = Item(np.ones((16, 3 * 2 * 14 * 14), np.float32), (1, 8, 2))
    with serving(checkpoints("qwen2_vl"), program=("-c", broken)) as process, Client(process.target) as client:
        with pytest.raises(EncodeFailed, match="the engine stopped"):
            client.encode([item])
        assert process.process.wait(30) == 1
        assert "ZeroDivisionError: injected" in process.log()


def run(*words: str) -> tuple[int, str]:
    done = finished(*words)
    return done.returncode, done.stderr


class TestExit:
    """One clear sentence and a code other than 0."""

    @pytest.mark.parametrize(
        ("words", "told"),
        [
            (["serve", "--modle", "m"], "No such option: --modle (Possible options: --decode, --model)"),
            (["bogus"], "unknown command: bogus"),
            (["demo-checkpoint", "--model-type", "gpt2", "--out", "/nowhere/x"], "no demo checkpoint"),
        ],
    )
    def test_wrong_words(self, words: list[str], told: str) -> None:
        code, error = run(*words)
        assert code != 0
        assert told in error
        assert "Traceback" not in error

    def test_unsupported_model(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text('{"model_type": "bert"}')
        code, error = run("serve", "--model", str(tmp_path), "--port", "0", "--metrics-port", "0")
        assert code == 1
        assert "model_type 'bert' is not supported; docs/models.md lists the " in error
        assert "Traceback" not in error

    def test_a_wrong_directory_is_reported_before_ports_are_announced(self, tmp_path: Path) -> None:
        words = ("--port", "0", "--metrics-port", "0")
        for model, text in ((str(tmp_path / "none"), f"none does not exist in the directory {tmp_path}: expected a "),
                            ("tests/e2e/none", "tests/e2e/none does not exist in the directory "),
                            ("~nobody-here/x", "~nobody-here/x does not exist: expected a directory or a hub "),
                            (str(tmp_path), "no config.json")):  # fmt: skip
            done = finished("serve", "--model", model, *words)
            assert (done.returncode, done.stdout) == (1, "")
            assert text in done.stderr

    @pytest.mark.parametrize("name", ["", "metrics-", "http-"])
    def test_an_address_of_another_machine(self, name: str) -> None:
        words = ("--port=0", "--metrics-port=0", "--http-port=0", f"--{name}host=203.0.113.1")
        reason = "cannot listen on 203.0.113.1:0: it is not an address of this machine; 0.0.0.0 stands for all"
        assert run("serve", "--model", "m/m", *words) == (1, f"vitwire-server: --{name}port: {reason}\n")

    def test_port_taken(self, server: ServerProcess) -> None:
        port, metrics = server.port, server.metrics_port
        for words, taken in (
            (f"--host localhost --port {port} --metrics-port 0", f"--port: cannot listen on localhost:{port}"),
            (f"--host 0.0.0.0 --port {port} --metrics-port 0", f"--port: cannot listen on 0.0.0.0:{port}"),
            (f"--port 0 --metrics-port {metrics}", f"--metrics-port: cannot listen on 127.0.0.1:{metrics}"),
        ):
            code, error = run("serve", "--model", "m/m", *words.split())
            assert (code, f"{taken}: Address already in use" in error) == (1, True)
        code, error = run("serve", "--model", "m/m", "--devices", "cpu,cpu", "--port", str(port - 1), "--no-metrics")
        assert code == 1  # another process may have the first one
        assert any(f"--port: cannot listen on 127.0.0.1:{each}: " in error for each in (port - 1, port))


def test_unix_socket(checkpoints: Checkpoints, tmp_path: Path) -> None:
    path = tmp_path / "vitwire.sock"
    with serving(checkpoints("qwen2_vl"), *PIXELS_ONLY, "--unix-socket", str(path)), Client(f"unix:{path}") as client:
        assert client.health() == "SERVING"
        flags = ("--port", "0", "--metrics-port", "0", "--unix-socket", str(path))
        code, error = run("serve", "--model", str(checkpoints("qwen2_vl")), *flags)
        assert (code, f"cannot listen on {path}: [Errno 98] another server listens there" in error) == (1, True)
        assert client.health() == "SERVING"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    with serving(checkpoints("qwen2_vl"), *PIXELS_ONLY, "--unix-socket", str(path)), Client(f"unix:{path}") as client:
        assert client.health() == "SERVING", "nobody listened there"


@pytest.mark.parametrize("closed", [True, False], ids=["from the start", "after the first line"])
def test_stdout_may_be_closed(checkpoints: Checkpoints, *, closed: bool, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "vitwire_server", "serve", "--model", str(checkpoints("qwen2_vl")), *PIXELS_ONLY]
    flags = ["--port", str(port), "--metrics-port", "0", "--lame-duck-seconds", "0"]
    shell = f"exec {shlex.join([*words, *flags])} {'>&-' if closed else ''}"
    with (tmp_path / "log").open("wb+") as log:
        process = subprocess.Popen(shell, shell=True, stdout=subprocess.PIPE, stderr=log)
        assert process.stdout
        assert closed or process.stdout.readline().startswith(b"listening on")
        process.stdout.close()
        try:
            with Client(f"127.0.0.1:{port}") as client:
                deadline = time.monotonic() + 120
                while not is_serving(client):
                    assert process.poll() is None
                    assert time.monotonic() < deadline
                    time.sleep(0.1)
        finally:
            process.terminate()
        assert process.wait(60) == 0
        log.seek(0)
        assert b"Traceback" not in log.read()


def is_serving(client: Client) -> bool:
    try:
        return client.health() == "SERVING"
    except Unavailable:
        return False
