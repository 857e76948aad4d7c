"""`--rpc-processes`: several processes speak gRPC for one engine, and nobody can tell, even when one of them dies."""

import re
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from certificates import Authority
from checkpoints import Checkpoints
from entered import entered
from faults import FAULTY, settle
from load import COLUMNS, image, request
from processes import channel_to, edges, listening
from servers import PIXELS_ONLY, ServerProcess, finished, serving, supervising
from vitwire import Client, Item
from vitwire.v1 import encoder_pb2 as pb
from vitwire.v1.encoder_pb2_grpc import EncoderServiceStub
from vitwire_server.rpc.server import LIVENESS
from waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="edges share a port as Linux allows it")
SHAPE = ("--rpc-processes", "2", "--dtype", "float32")
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE = "vitwire.v1.EncoderService"
LONG = 60.0
Watch = Iterator[health_pb2.HealthCheckResponse]
SINGLE = (*PIXELS_ONLY, "--rpc-processes", "1", "--dtype", "float32", "--cache-bytes", "3000000")

single = entered(lambda checkpoints: serving(checkpoints("qwen2_vl"), *SINGLE))


@pytest.fixture(scope="module")
def server(checkpoints: Checkpoints, fault: Path, unix_socket: Path) -> Iterator[ServerProcess]:
    flags = ("--cache-bytes", "3000000", "--canary-seconds", "0", "--unix-socket", str(unix_socket))
    with serving(
        checkpoints("qwen2_vl"), *PIXELS_ONLY, *SHAPE, *flags, "--log-level", "debug", program=(FAULTY, str(fault))
    ) as process:
        yield process
        assert process.stop() == 0, process.log()[-4000:]
        assert "Traceback" not in process.log()


@contextmanager
def stubs(server: ServerProcess) -> Iterator[list[EncoderServiceStub]]:
    """A stub for each edge, over a connection of its own."""
    with ExitStack() as stack:
        yield [EncoderServiceStub(stack.enter_context(channel_to(server, edge))) for edge in edges(server)]


@contextmanager
def broken(fault: Path, how: str) -> Iterator[None]:
    fault.write_text(how)
    try:
        yield
    finally:
        fault.write_text("")


def rows(answers: Iterator[pb.EncodeResponse]) -> list[bytes]:
    """The rows of each item."""
    found: dict[int, bytes] = {}
    for answer in answers:
        assert not answer.HasField("error"), answer.error
        found[answer.item] = found.get(answer.item, b"") + answer.chunk.data
    return [found[number] for number in sorted(found)]


def code(stub: EncoderServiceStub, message: pb.EncodeRequest) -> str:
    """What came of a call."""
    try:
        return "OK" if len(rows(stub.Encode(message, timeout=LONG))) == len(message.items) else "INCOMPLETE"
    except grpc.RpcError as error:
        return str(error.code().name)


def in_flight(server: ServerProcess, count: int) -> bool:
    return server.metric("vitwire_inflight_requests") == count


def gone(processes: list[psutil.Process], seconds: float = 20) -> bool:
    return not psutil.wait_procs(processes, timeout=seconds)[1]


def test_every_edge_answers_as_one_process_does(server: ServerProcess, single: ServerProcess) -> None:
    message = request(image(4, 4, level=3), image(8, 2, level=4), image(16, 16, level=5))
    large = Item(np.ones((4096, COLUMNS), np.float32), (1, 64, 64))
    with stubs(server) as each, grpc.insecure_channel(single.target) as channel:
        expected = rows(EncoderServiceStub(channel).Encode(message, timeout=LONG))
        for stub in each:
            assert rows(stub.Encode(message, timeout=LONG)) == expected
    with Client(server.target) as client, Client(single.target) as other:
        assert (client.encode([large])[0].numpy() == other.encode([large])[0].numpy()).all()
        assert client.model() == other.model()
    settle(server)


def test_the_engine_listens_nowhere_and_loads_torch_alone(server: ServerProcess) -> None:
    assert {server.port, server.metrics_port} == listening(server)
    own = psutil.Process(server.process.pid).net_connections("tcp")
    assert {each.laddr.port for each in own if each.status == psutil.CONN_LISTEN} == {server.metrics_port}
    for edge in edges(server):
        assert "libtorch" not in Path(f"/proc/{edge.pid}/maps").read_text()


def test_what_every_process_has_loaded_is_exempt_from_garbage_collections(server: ServerProcess) -> None:
    exempt = r"(\d+) objects are exempt from garbage collections"
    own = server.wait_for(exempt)
    of_edges = [server.wait_for(rf"\[rpc-{number}\].*\b{exempt}") for number in range(2)]
    assert all(int(each[1]) > 10_000 for each in (own, *of_edges))
    assert len(re.findall(exempt, server.log())) == 3


def test_the_unix_socket(server: ServerProcess, unix_socket: Path) -> None:
    with Client(f"unix:{unix_socket}") as client:
        assert client.health() == "SERVING"
        assert len(client.encode([Item(np.ones((16, COLUMNS), np.float32), (1, 4, 4))])) == 1


def test_edges_share_the_cache_and_what_is_in_flight(server: ServerProcess, fault: Path) -> None:
    names = ("vitwire_batch_items_sum", "vitwire_cache_hits_total")
    named, equal = image(4, 4, level=61), request(image(8, 8, level=62))
    named.content_id = "sixty-one"
    with stubs(server) as (one, other), ThreadPoolExecutor(2) as pool:
        before = [server.metric(name) for name in names]
        expected = rows(one.Encode(request(named), timeout=LONG))
        lookup = pb.Item(content_id="sixty-one")
        assert rows(other.Encode(request(lookup), timeout=LONG)) == expected
        assert rows(other.Encode(request(named), timeout=LONG)) == expected
        with broken(fault, "hang"):
            calls = [pool.submit(rows, stub.Encode(equal, timeout=LONG)) for stub in (one, other)]
            until(lambda: server.metric("vitwire_admitted_items") == 2)
        first, second = (call.result(LONG) for call in calls)
        assert first == second
    assert [server.metric(name) - old for name, old in zip(names, before, strict=True)] == [2, 3]
    settle(server)


def test_request_ids_and_labels_name_the_edge(server: ServerProcess) -> None:
    with stubs(server) as each:
        for number, stub in enumerate(each):
            with pytest.raises(grpc.RpcError) as refused:
                list(stub.Encode(request(), metadata=(("x-request-id", f"wanted-{number}"),), timeout=LONG))
            assert dict(refused.value.trailing_metadata())["x-request-id"] == f"wanted-{number}"
            assert re.search(rf"\[rpc-{number}\]", line_with(server, f"wanted-{number}"))


def test_edges_are_one_replica(server: ServerProcess) -> None:
    with stubs(server) as each:
        calls = [stub.Encode(request(image(level=63)), timeout=LONG) for stub in each]
        assert all(list(call) for call in calls)
        names = {dict(call.trailing_metadata())["x-vitwire-replica"] for call in calls}
    assert len(names) == 1


def line_with(server: ServerProcess, word: str) -> str:
    return server.wait_for(rf"(?m)^.*{word}.*$")[0]


def watch(channel: grpc.Channel) -> Watch:
    watched: Watch = health_pb2_grpc.HealthStub(channel).Watch(
        health_pb2.HealthCheckRequest(service=SERVICE), timeout=5 * LONG
    )
    return watched


def wait_for(watched: Watch, status: int) -> None:
    while next(watched).status != status:
        pass


def check(channel: grpc.Channel, name: str = "") -> int:
    status: int = (
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name), timeout=LONG).status
    )
    return status


def test_a_frozen_engine_is_noticed_by_every_edge_and_recovers(server: ServerProcess) -> None:
    """The edges still run: they answer what is in flight, and probes."""
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        channels = [stack.enter_context(channel_to(server, edge)) for edge in edges(server)]
        watches = [watch(channel) for channel in channels]
        for watched in watches:
            wait_for(watched, SERVING)
        server.process.send_signal(signal.SIGSTOP)
        try:
            calls = [
                pool.submit(code, EncoderServiceStub(channel), request(image(level=200 + number)))
                for number, channel in enumerate(channels)
            ]
            for watched in watches:
                wait_for(watched, NOT_SERVING)
            assert [call.result(LONG) for call in calls] == ["UNAVAILABLE"] * 2
            assert [check(channel) for channel in channels] == [NOT_SERVING] * 2
        finally:
            server.process.send_signal(signal.SIGCONT)
        for watched in watches:
            wait_for(watched, SERVING)
        assert [code(EncoderServiceStub(channel), request(image())) for channel in channels] == ["OK"] * 2
    settle(server)


def test_a_killed_edge_costs_only_its_own_rpcs_and_returns(server: ServerProcess, fault: Path) -> None:
    """Its counts stay on the page, which has what clients counted."""
    answered = server.metric("vitwire_requests_total", method="Encode", code="OK")
    restarts = server.metric("vitwire_process_restarts_total")
    victim = edges(server)[0]
    with stubs(server) as (one, other), ThreadPoolExecutor(16) as pool:
        with broken(fault, "hang"):
            calls = [
                [pool.submit(code, stub, request(image(level=100 + n), image(16, 16, level=100 + n))) for n in range(8)]
                for stub in (one, other)
            ]
            until(lambda: in_flight(server, 16))
            until(lambda: server.metric("vitwire_admitted_items") == 32)
            victim.kill()
            assert {call.result(LONG) for call in calls[0]} == {"UNAVAILABLE"}
            until(lambda: server.metric("vitwire_admitted_items") == 16)
        assert {call.result(LONG) for call in calls[1]} == {"OK"}
    settle(server, lost=8)
    assert server.metric("vitwire_requests_total", method="Encode", code="OK") == answered + 8
    until(lambda: server.metric("vitwire_process_restarts_total", process="rpc-0") >= 1)
    assert server.metric("vitwire_process_restarts_total") == restarts + 1
    until(lambda: len(edges(server)) == 2)
    with stubs(server) as both:
        assert [code(stub, request(image(level=9))) for stub in both] == ["OK"] * 2
    assert server.metric("vitwire_requests_total", method="Encode", code="OK") == answered + 10
    assert "rpc-0 exited unexpectedly (SIGKILL); restarting in" in server.log()


@pytest.mark.matrix
def test_edges_killed_again_and_again_under_load_leave_nothing(server: ServerProcess) -> None:
    """Each time while pixels are written, queued, on the device and sent."""
    outcomes: Counter[str] = Counter()
    with ThreadPoolExecutor(8) as pool:
        for turn in range(2):
            over = time.monotonic() + 1.0
            calls = [pool.submit(keep_calling, server, over) for _ in range(8)]
            time.sleep(0.5)
            edges(server)[turn % 2].kill()
            outcomes += sum((call.result(LONG) for call in calls), Counter[str]())
            until(lambda: len(edges(server)) == 2)
    assert set(outcomes) <= {"OK", "UNAVAILABLE", "CANCELLED"}
    assert outcomes["OK"]
    settle(server, lost=outcomes.total())


def keep_calling(server: ServerProcess, until: float) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    message = request(*(image(16, 16, level=level) for level in range(6)))
    with grpc.insecure_channel(server.target, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        while time.monotonic() < until:
            outcomes[code(EncoderServiceStub(channel), message)] += 1
    return outcomes


@pytest.mark.parametrize("edges_", ["1", "2"])
@pytest.mark.parametrize("first", ["foreign", "single", "server"])
def test_a_port_that_is_taken_is_refused(
    first: str, edges_: str, checkpoints: Checkpoints, request: pytest.FixtureRequest
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as foreign:
        port = foreign.getsockname()[1] if first == "foreign" else request.getfixturevalue(first).port
        words = ["serve", "--model", str(checkpoints("qwen2_vl")), "--metrics-port", "0", "--port", str(port)]
        done = finished(*words, "--rpc-processes", edges_)
    assert done.returncode == 1
    assert re.fullmatch(rf".*cannot listen on 127\.0\.0\.1:{port}.*", done.stderr.strip().splitlines()[-1])


@contextmanager
def busy(
    checkpoints: Checkpoints, fault: Path, *flags: str
) -> Iterator[tuple[ServerProcess, list[grpc.Channel], list[Future[str]]]]:
    """A server whose engine hangs with RPCs of both edges in flight."""
    fault.write_text("hang")
    flags = (*SHAPE, "--canary-seconds", "0", "--drain-seconds", "60", *flags)
    with (
        ThreadPoolExecutor(16) as pool,
        serving(checkpoints("qwen2_vl"), *PIXELS_ONLY, *flags, wait=False, program=(FAULTY, str(fault))) as server,
        ExitStack() as stack,
    ):
        fault.write_text("")
        server.wait_for("ready: ")
        channels = [stack.enter_context(channel_to(server, edge)) for edge in edges(server)]
        fault.write_text("hang")
        calls = [
            pool.submit(code, EncoderServiceStub(channel), request(image(level=n), image(16, 16, level=n)))
            for channel in channels
            for n in range(8)
        ]
        until(lambda: in_flight(server, 16))
        try:
            yield server, channels, calls
        finally:
            fault.write_text("")


def test_a_killed_engine_ends_every_rpc_and_every_edge(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Also an edge that is stopped: a restart needs the port."""
    with busy(checkpoints, tmp_path / "fault") as (server, _, calls):
        processes, begun = edges(server), time.monotonic()
        processes[0].suspend()
        server.process.kill()
        assert {call.result(LONG) for call in calls} == {"UNAVAILABLE"}
        assert time.monotonic() - begun < 20
        assert gone(processes)
        server.process.wait(20)  # edges end with its first thread, its sockets close with its last
        with socket.create_server(("127.0.0.1", server.port)):
            pass


def test_draining_answers_what_was_accepted_in_every_edge(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Probes of both edges see it."""
    fault = tmp_path / "fault"
    with busy(checkpoints, fault, "--lame-duck-seconds", "1") as (server, channels, calls):
        processes, watches = edges(server), [watch(channel) for channel in channels]
        for watched in watches:
            wait_for(watched, SERVING)
        server.process.terminate()
        for watched in watches:
            wait_for(watched, NOT_SERVING)
        assert [check(channel) for channel in channels] == [NOT_SERVING] * 2
        assert [check(channel, LIVENESS) for channel in channels] == [SERVING] * 2
        time.sleep(1.5)
        late = [code(EncoderServiceStub(channel), request(image())) for channel in channels]
        assert late == ["UNAVAILABLE"] * 2, "refused after the lame duck"
        fault.write_text("")
        assert {call.result(LONG) for call in calls} == {"OK"}
        assert server.process.wait(LONG) == 0
        assert gone(processes)


@pytest.mark.matrix
def test_an_edge_that_returns_while_draining_takes_nothing(checkpoints: Checkpoints, tmp_path: Path) -> None:
    with busy(checkpoints, tmp_path / "fault") as (server, _, calls):
        victim = edges(server)[0]
        server.process.terminate()
        server.wait_for("draining")
        time.sleep(1)
        victim.kill()
        until(lambda: len(edges(server)) == 2 and edges(server)[0].pid != victim.pid)
        with channel_to(server, edges(server)[0]) as channel:
            assert code(EncoderServiceStub(channel), request(image())) == "UNAVAILABLE"
        (tmp_path / "fault").write_text("")
        assert Counter(call.result(LONG) for call in calls) == {"OK": 8, "UNAVAILABLE": 8}
        assert server.process.wait(LONG) == 0


@pytest.mark.matrix
def test_a_second_signal_kills_all(checkpoints: Checkpoints, tmp_path: Path) -> None:
    with busy(checkpoints, tmp_path / "fault") as (server, _, calls):
        processes = edges(server)
        server.process.terminate()
        server.wait_for("draining")
        time.sleep(0.6)  # sooner it would be a duplicate
        server.process.terminate()
        assert server.process.wait(LONG) == -signal.SIGKILL
        assert gone(processes)
        assert {call.result(LONG) for call in calls} == {"UNAVAILABLE"}


@pytest.mark.matrix
def test_several_devices_with_edges_each(checkpoints: Checkpoints) -> None:
    with supervising(checkpoints("qwen2_vl"), "cpu,cpu", *SHAPE) as (supervisor, children):
        for label, child in children.items():
            wanted = f"bad-{label}"
            metadata = (("x-request-id", wanted),)
            seen: set[str] = set()
            while len(seen) < 2:
                with grpc.insecure_channel(child.target, [("grpc.use_local_subchannel_pool", 1)]) as channel:
                    with pytest.raises(grpc.RpcError):
                        list(EncoderServiceStub(channel).Encode(request(), metadata=metadata, timeout=LONG))
                    assert code(EncoderServiceStub(channel), request(image())) == "OK"
                seen |= set(re.findall(rf"\[{label}/(rpc-\d)\].*{wanted}", supervisor.log()))
            assert seen == {"rpc-0", "rpc-1"}
            assert child.metric("vitwire_process_restarts_total") == 0
        assert supervisor.stop() == 0


@pytest.mark.matrix
def test_certificates_and_tokens_are_replaced_in_every_edge(checkpoints: Checkpoints, tmp_path: Path) -> None:
    authority, tokens = Authority(tmp_path / "pki").issue(), tmp_path / "tokens"
    alice, bob = "alice-0123456789abcdef", "bob-0123456789abcdef"
    tokens.write_text(f"{alice} alice\n")
    flags = ("--tls-cert", authority.cert, "--tls-key", authority.key, "--auth-tokens-file", tokens)

    def all_connections(token: str, code: grpc.StatusCode, credentials: grpc.ChannelCredentials) -> bool:
        return all(outcome(token, credentials) is code for _ in range(16))

    def outcome(token: str, credentials: grpc.ChannelCredentials) -> grpc.StatusCode:
        with grpc.secure_channel(server.target, credentials, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            try:
                metadata = (("authorization", f"Bearer {token}"),)
                EncoderServiceStub(channel).GetModel(pb.GetModelRequest(), metadata=metadata, timeout=20)
            except grpc.RpcError as error:
                return error.code()
        return grpc.StatusCode.OK

    ok, refused, unreachable = (
        grpc.StatusCode.OK,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNAVAILABLE,
    )
    with serving(checkpoints("qwen2_vl"), *PIXELS_ONLY, *SHAPE, *map(str, flags)) as server:
        old = authority.credentials()
        assert all_connections(alice, ok, old)
        assert all_connections(bob, refused, old)
        tokens.write_text(f"{bob} bob\n")
        until(lambda: all_connections(bob, ok, old) and all_connections(alice, refused, old))
        successor = Authority(tmp_path / "successor").issue()
        authority.replace(successor.cert.read_bytes(), successor.key.read_bytes())
        until(lambda: all_connections(bob, ok, successor.credentials()) and all_connections(bob, unreachable, old))
