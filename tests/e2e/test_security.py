"""Who gets in and who does not: certificates, tokens, and their replacement under traffic."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from typer.testing import CliRunner

import waiting
from both_clients import Call, both
from certificates import YESTERDAY, Authority
from checkpoints import Checkpoints
from entered import entered
from processes import listening
from servers import PIXELS_ONLY, ServerProcess, serving
from vitwire import AsyncClient, Client, EncodeFailed, InvalidItem, Item, Unauthenticated, Unavailable
from vitwire.v1 import encoder_pb2 as pb
from vitwire.v1.encoder_pb2_grpc import EncoderServiceStub
from vitwire_cli.app import app

Mutual = tuple[ServerProcess, Authority]
COLUMNS = 3 * 2 * 14 * 14
ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"
SERVING = health_pb2.HealthCheckResponse.SERVING
RELOAD_SECONDS = 30
until = partial(waiting.until, seconds=RELOAD_SECONDS)
"""A server looks at its files when somebody calls."""
EDGES_MET = 16
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)


def item(rows: int = 16) -> Item:
    return Item(np.ones((rows, COLUMNS), np.float32), (1, rows // 2, 2))


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("tokens") / "tokens"
    file.write_text(f"{ALICE} alice\n")
    return file


@pytest.fixture(scope="module")
def server(checkpoints: Checkpoints, authority: Authority, tokens: Path) -> Iterator[ServerProcess]:
    flags = ("--tls-cert", authority.cert, "--tls-key", authority.key, "--auth-tokens-file", tokens)
    with serving(checkpoints("qwen2_vl"), *PIXELS_ONLY, "--dtype", "float32", *map(str, flags)) as process:
        yield process


@pytest.fixture(scope="module")
def mutual(checkpoints: Checkpoints, authority: Authority) -> Iterator[Mutual]:
    """A server that asks for certificates of another authority than its own."""
    clients = Authority(authority.folder.parent / "clients").issue("client.example")
    flags = ("--tls-cert", authority.cert, "--tls-key", authority.key, "--tls-client-ca", clients.root)
    with serving(checkpoints("qwen2_vl"), *PIXELS_ONLY, "--dtype", "float32", *map(str, flags)) as process:
        yield process, clients


plain = entered(lambda checkpoints: serving(checkpoints("qwen2_vl"), *PIXELS_ONLY))
"""A server without TLS."""


def health(target: str, credentials: grpc.ChannelCredentials) -> int:
    """What the health service answers on a connection of its own. Raises RpcError."""
    with grpc.secure_channel(target, credentials, OWN_CONNECTION) as channel:
        status: int = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10).status
        return status


def is_refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except (grpc.RpcError, Unauthenticated):
        return True
    return False


def fails_at_once(target: str, tls: Path | None, message: str) -> None:
    """Both clients, without a retry although they wait for servers that start."""

    async def of_asyncio() -> None:
        async with AsyncClient(target, tls=tls, timeout=60, wait_for_ready=True) as client:
            await client.encode([item()])

    with Client(target, tls=tls, timeout=60, wait_for_ready=True) as client:
        for call in (client.health, client.model, lambda: asyncio.run(of_asyncio())):
            with pytest.raises(Unavailable, match=message) as failed:
                call()
            assert failed.value.is_permanent
            assert "gave up" not in str(failed.value)


def every(call: Callable[[], bool]) -> bool:
    """Whether it holds for connections enough to meet every edge: each looks at the files for itself."""
    return all(call() for _ in range(EDGES_MET))


class TestTls:
    @both
    async def test_every_rpc_of_both_clients(self, make: Call, server: ServerProcess, authority: Authority) -> None:
        for tls in (authority.root, authority.credentials()):
            async with make(server.target, tls=tls, token=ALICE) as client:
                (small,) = await client.encode([item()])
                (large,) = await client.encode([item(1024)])
                assert (len(small.numpy()), len(large.numpy())) == (4, 256)
                assert await client.health() == "SERVING"

    def test_the_command_line(self, server: ServerProcess, authority: Authority) -> None:
        words = ["info", "--target", server.target, "--ca", str(authority.root)]
        assert CliRunner().invoke(app, [*words, "--token", ALICE]).exit_code == 0
        refused = CliRunner().invoke(app, words)
        assert (refused.exit_code, refused.stderr) == (
            1,
            "vitwire: a bearer token is required: set --token or VITWIRE_TOKEN\n",
        )


class TestWrongConnections:
    """What cannot succeed is not tried again, and the error says what to change."""

    def test_in_the_clear_nobody_is_served(self, server: ServerProcess) -> None:
        fails_at_once(server.target, None, "the server speaks TLS: set tls=True")

    def test_a_client_that_trusts_another_authority(self, server: ServerProcess, tmp_path: Path) -> None:
        foreign = Authority(tmp_path / "foreign")
        fails_at_once(server.target, foreign.root, "certificate is not trusted .unable to get local issuer certificate")

    def test_a_certificate_for_another_name(self, authority: Authority, checkpoints: Checkpoints) -> None:
        elsewhere = Authority(authority.folder.parent / "elsewhere", authority.ca).issue("elsewhere.example")
        flags = ("--tls-cert", str(elsewhere.cert), "--tls-key", str(elsewhere.key))
        with serving(checkpoints("qwen2_vl"), *PIXELS_ONLY, *flags) as server:
            fails_at_once(server.target, authority.root, "does not cover the target's name")

    def test_tls_with_a_server_that_has_none(self, plain: ServerProcess, authority: Authority) -> None:
        fails_at_once(plain.target, authority.root, "the server does not speak TLS: leave out tls=")

    def test_the_port_of_metrics(self, plain: ServerProcess) -> None:
        speaks = "does not speak gRPC: check the port, which may be the metrics port"
        fails_at_once(f"127.0.0.1:{plain.metrics_port}", None, speaks)

    def test_a_client_without_the_certificate_that_is_required(self, mutual: Mutual, authority: Authority) -> None:
        server, _ = mutual
        advice = r"the server accepts only clients with a certificate .*ssl_channel_credentials"
        fails_at_once(server.target, authority.root, advice)
        words = ["info", "--target", server.target, "--ca", str(authority.root)]
        refused = CliRunner().invoke(app, words)
        assert refused.exit_code == 1
        assert "--cert and --key" in refused.stderr
        assert "gave up" not in refused.stderr

    def test_a_client_whose_certificate_is_refused_tries_again(self, mutual: Mutual, authority: Authority) -> None:
        """A probe has no certificate to show, so it does not know whether the client's is the reason."""
        with Client(mutual[0].target, tls=authority.credentials(authority), timeout=60, max_retries=1) as client:
            with pytest.raises(Unavailable, match=r"accepts only clients with a certificate .*2 attempts") as refused:
                client.model()
            assert not refused.value.is_permanent

    async def test_another_grpc_server(self) -> None:
        with ThreadPoolExecutor(1) as pool:
            other = grpc.server(pool)
            port = other.add_insecure_port("127.0.0.1:0")
            other.start()
            async with AsyncClient(f"127.0.0.1:{port}", timeout=60) as client:
                with pytest.raises(EncodeFailed, match="the target is not a Vitwire server"):
                    await client.model()
            other.stop(None).wait()


class TestMutualTls:
    def test_a_certificate_of_the_authority(self, mutual: Mutual, authority: Authority) -> None:
        server, clients = mutual
        with Client(server.target, tls=authority.credentials(clients)) as client:
            assert len(client.encode([item(), item(1024)])) == 2
        words = ["health", "--target", server.target, "--ca", str(authority.root)]
        assert CliRunner().invoke(app, [*words, "--cert", str(clients.cert), "--key", str(clients.key)]).exit_code == 0

    @pytest.mark.parametrize("kind", ["none", "foreign", "expired", "of the server's authority"])
    def test_any_other_certificate(self, mutual: Mutual, authority: Authority, tmp_path: Path, kind: str) -> None:
        server, clients = mutual
        shown = {
            "none": lambda: None,
            "foreign": lambda: Authority(tmp_path / "foreign").issue("client.example"),
            "expired": lambda: Authority(tmp_path / "late", clients.ca).issue("client.example", not_after=YESTERDAY),
            "of the server's authority": lambda: authority,
        }[kind]()
        with pytest.raises(grpc.RpcError) as refused:
            health(server.target, authority.credentials(shown))
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE

    def test_connections_that_fail_leave_the_log_alone(self, mutual: Mutual) -> None:
        server, _ = mutual
        before = server.log()
        for _ in range(30):
            with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
                connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
                with suppress(ConnectionError):
                    connection.recv(64)
        assert server.log() == before


class TestTokens:
    @pytest.mark.parametrize("token", [None, BOB, ALICE[:-1], "alice"])
    def test_who_has_none_is_refused(self, server: ServerProcess, authority: Authority, token: str | None) -> None:
        with Client(server.target, tls=authority.root, token=token, timeout=20) as client:
            assert client.health() == "SERVING"
            assert client.health("liveness") == "SERVING"
            with pytest.raises(Unauthenticated):
                client.model()
        headers = (("authorization", f"Bearer {token}"),) if token else ()
        unlimited = (("grpc.max_send_message_length", -1), *OWN_CONNECTION)
        with grpc.secure_channel(server.target, authority.credentials(), unlimited) as channel:
            stub = EncoderServiceStub(channel)
            encode: list[Callable[[], Any]] = [
                lambda: list(stub.Encode(pb.EncodeRequest(), metadata=headers, timeout=20)),
                lambda: list(stub.EncodeStream(iter([]), metadata=headers, timeout=20)),
                lambda: list(stub.EncodeStream(uploads(1 << 20), metadata=headers, timeout=20)),
                lambda: list(channel.stream_stream(REFLECTION)(iter([b""]), metadata=headers, timeout=20)),
            ]
            for call in encode:
                with pytest.raises(grpc.RpcError) as refused:
                    call()
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED

    def test_tokens_show_nowhere(self, server: ServerProcess) -> None:
        log = server.log()
        assert "UNAUTHENTICATED" in log
        assert ALICE not in log
        assert BOB not in log


REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


def uploads(nbytes: int) -> Iterator[pb.EncodeStreamRequest]:
    while True:
        yield pb.EncodeStreamRequest(chunk=pb.EncodeStreamChunk(item=0, data=bytes(nbytes)))


class Traffic:
    """A client that encodes without a pause, and remembers what went wrong."""

    def __init__(self, make: Callable[[], Client]) -> None:
        self._make = make
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.errors: list[Exception] = []
        self.answered = 0

    def _run(self) -> None:
        with self._make() as client:
            while not self._over.is_set():
                try:
                    self.answered += len(client.encode([item()]))
                except Exception as error:  # noqa: BLE001 - any error fails the test
                    self.errors.append(error)

    def __enter__(self) -> "Traffic":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


class TestReplacement:
    """Files change while a client encodes without a pause, and it never notices."""

    def test_certificates_and_tokens(
        self, server: ServerProcess, authority: Authority, tokens: Path, tmp_path: Path
    ) -> None:
        target, old = server.target, authority.credentials()
        before = authority.cert.read_bytes(), authority.key.read_bytes()
        successor = Authority(tmp_path / "successor").issue()

        with Traffic(lambda: Client(target, tls=authority.root, token=ALICE)) as traffic:
            with ExitStack() as undo:
                undo.callback(authority.replace, *before)
                authority.replace(successor.cert.read_bytes(), successor.key.read_bytes())
                until(lambda: every(lambda: not is_refused(lambda: health(target, successor.credentials()))))
                with pytest.raises(grpc.RpcError):
                    health(target, old)
                authority.replace(b"no certificate", successor.key.read_bytes())
                until(
                    lambda: (
                        health(target, successor.credentials()) and "keeping the previous certificate" in server.log()
                    )
                )
                authority.issue(not_after=YESTERDAY)
                until(lambda: every(lambda: is_refused(lambda: health(target, successor.credentials()))))
                with pytest.raises(grpc.RpcError):
                    health(target, old)
            until(lambda: every(lambda: not is_refused(lambda: health(target, old))))
            with Client(target, tls=old, token=BOB, timeout=20) as bob:
                with pytest.raises(Unauthenticated):
                    bob.model()
                tokens.write_text(f"{ALICE} alice\n{BOB} bob\n")
                until(lambda: not is_refused(bob.model) and not is_refused(lambda: bob.encode([item()])))
                tokens.write_text("two words too many\n")
                server.wait_for("keeping the previous tokens")
                assert len(bob.encode([item()])) == 1
                tokens.write_text(f"{ALICE} alice\n")
                until(lambda: is_refused(lambda: bob.encode([item()])))
            answered = traffic.answered
            until(lambda: traffic.answered > answered)
        assert not traffic.errors


@pytest.mark.parametrize("processes", ["1", "2"])
def test_the_metric_has_the_expiry_of_the_certificate_that_is_served(
    checkpoints: Checkpoints, tmp_path: Path, processes: str
) -> None:
    soon, later = (datetime.now(UTC).replace(microsecond=0) + timedelta(days=days) for days in (3, 30))
    authority = Authority(tmp_path / "pki").issue(not_after=soon)
    flags = ("--tls-cert", authority.cert, "--tls-key", authority.key, "--rpc-processes", processes)
    with serving(checkpoints("qwen2_vl"), *PIXELS_ONLY, *map(str, flags)) as server:

        def is_shown(expiry: datetime) -> bool:
            return server.metric("vitwire_tls_certificate_expiry_timestamp_seconds") == expiry.timestamp()

        def connects() -> bool:
            return not is_refused(lambda: health(server.target, authority.credentials()))

        assert is_shown(soon)
        authority.issue(not_after=later)
        until(lambda: every(connects) and is_shown(later))
        authority.replace(b"no certificate", authority.key.read_bytes())
        until(lambda: every(connects) and "keeping the previous certificate" in server.log())
        assert is_shown(later)


class TestDefaults:
    def test_loopback_is_quiet_and_wide_is_warned_about(self, checkpoints: Checkpoints, authority: Authority) -> None:
        model = checkpoints("qwen2_vl")
        with serving(model, wait=False) as narrow:
            assert "WARNING" not in narrow.log()
        with serving(model, "--host", "0.0.0.0", "--budgets", "16", wait=False) as wide:
            assert "serves anyone who can reach the port" in wide.log()
            assert "without TLS" in wide.log()
            wide.wait_for("--budgets 16 is ignored: graphs are off on cpu")

    def test_metrics_and_reflection_can_be_closed(self, checkpoints: Checkpoints) -> None:
        with serving(checkpoints("qwen2_vl"), *PIXELS_ONLY, "--no-metrics", "--no-reflection") as process:
            assert listening(process) == {process.port}
            with grpc.insecure_channel(process.target) as channel:
                for path in (REFLECTION, "/grpc.channelz.v1.Channelz/GetServers"):
                    with pytest.raises(grpc.RpcError) as refused:
                        list(channel.stream_stream(path)(iter([b""]), timeout=20))
                    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
                for method in ("Check", "Watch"):  # stock, both would be INTERNAL and a traceback in the log
                    with pytest.raises(grpc.RpcError) as refused:
                        list(channel.unary_stream(f"/grpc.health.v1.Health/{method}")(b"\xff", timeout=20))
                    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "Traceback" not in process.log()


def test_headers_that_promise_much_cost_nothing(server: ServerProcess, authority: Authority) -> None:
    """A buffer is as large as its header says only as far as its bytes arrive."""
    memory = psutil.Process(server.process.pid).memory_info
    with Client(server.target, tls=authority.root, token=ALICE) as client:
        most = client.model().limits.patches_per_item
        client.encode([item()])
        before = memory().rss
        headers = (("authorization", f"Bearer {ALICE}"),)
        honest = pb.Tensor(data_type=pb.DATA_TYPE_FLOAT32, shape=[most, COLUMNS])
        with grpc.secure_channel(server.target, authority.credentials()) as channel:
            sent = threading.Event()

            def messages() -> Iterator[pb.EncodeStreamRequest]:
                for number in range(8):
                    described = pb.Item(modality=pb.MODALITY_IMAGE, grid=pb.Grid(t=1, h=most // 2, w=2), pixels=honest)
                    yield pb.EncodeStreamRequest(header=pb.EncodeStreamHeader(item=number, header=described))
                lie = pb.Tensor(data_type=pb.DATA_TYPE_FLOAT32, shape=[1 << 62, 1 << 62])
                described = pb.Item(modality=pb.MODALITY_IMAGE, grid=pb.Grid(t=1, h=1 << 31, w=1 << 31), pixels=lie)
                yield pb.EncodeStreamRequest(header=pb.EncodeStreamHeader(item=8, header=described))
                sent.wait(60)

            answers = EncoderServiceStub(channel).EncodeStream(messages(), metadata=headers, timeout=60)
            refused = next(answers)
            assert (refused.item, refused.error.code) == (8, grpc.StatusCode.INVALID_ARGUMENT.value[0])
            assert memory().rss - before < 64 << 20, "eight buffers of 300 MB were promised"
            answers.cancel()
            sent.set()
        with pytest.raises(InvalidItem):
            client.encode([Item(np.ones((16, COLUMNS), np.float32), (1, 8, 4))])
        assert len(client.encode([item()])) == 1
