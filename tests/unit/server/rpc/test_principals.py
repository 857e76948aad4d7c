"""Who a caller is to the service, through a real server's interceptor."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from certificates import Authority
from vitwire_server.rpc.credentials import Certificates, TokenAuth, Tokens, principal

TOKEN = "0123456789abcdef-alice"


async def whoami(_: bytes, context: Any) -> bytes:
    return principal(context).encode()


async def whoami_stream(_: object, context: Any) -> None:
    await context.write(principal(context).encode())


@asynccontextmanager
async def serving(auth: TokenAuth | None, certificates: Certificates | None = None) -> AsyncIterator[str]:
    server = grpc.aio.server(interceptors=[auth] if auth else [])
    methods = {
        "Who": grpc.unary_unary_rpc_method_handler(whoami),
        "WhoStream": grpc.stream_stream_rpc_method_handler(whoami_stream),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.B", methods),))
    address = "127.0.0.1:0"
    port = (
        server.add_secure_port(address, certificates.credentials())
        if certificates
        else server.add_insecure_port(address)
    )
    await server.start()
    try:
        yield f"localhost:{port}"
    finally:
        await server.stop(0)


@pytest.fixture
def auth(tmp_path: Path) -> TokenAuth:
    file = tmp_path / "tokens"
    file.write_text(f"{TOKEN} alice\n0123456789abcdef-bob bob\n")
    return TokenAuth(Tokens(file))


async def ask(channel: grpc.aio.Channel, *headers: tuple[str, str]) -> str:
    answer: bytes = await channel.unary_unary("/a.B/Who")(b"", metadata=headers, timeout=20)
    return answer.decode()


async def test_the_principal_is_the_tokens_name(auth: TokenAuth) -> None:
    async with serving(auth) as target, grpc.aio.insecure_channel(target) as channel:
        assert await ask(channel, ("authorization", f"Bearer {TOKEN}")) == "alice"
        assert await ask(channel, ("authorization", "bearer 0123456789abcdef-bob")) == "bob"
        stream = channel.stream_stream("/a.B/WhoStream")(metadata=(("authorization", f"Bearer {TOKEN}"),))
        assert await stream.read() == b"alice"


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("authorization", TOKEN)],
        [("authorization", f"Basic {TOKEN}")],
        [("authorization", "Bearer ")],
        [("authorization", "Bearer alice")],
        [("authorization", f"Bearer {TOKEN} {TOKEN}")],
        [("x-token", TOKEN)],
    ],
)
async def test_without_a_token_nothing_is_answered(auth: TokenAuth, headers: list[tuple[str, str]]) -> None:
    async with serving(auth) as target, grpc.aio.insecure_channel(target) as channel:
        for path in ("/a.B/Who", "/a.B/WhoStream", "/a.B/Nothing", "/grpc.health.v1.Healthy/Check"):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await channel.unary_unary(path)(b"", metadata=headers, timeout=20)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert TOKEN not in str(refused.value.details())


async def test_without_a_gate_everybody_is_nobody() -> None:
    async with serving(None) as target, grpc.aio.insecure_channel(target) as channel:
        assert await ask(channel, ("authorization", f"Bearer {TOKEN}")) == ""


async def test_the_principal_is_the_certificates_name(auth: TokenAuth, tmp_path: Path) -> None:
    own = Authority(tmp_path / "own").issue()
    client = Authority(tmp_path / "client").issue("worker-7.example")
    mutual = Certificates(own.cert, own.key, client.root)
    async with (
        serving(None, mutual) as target,
        grpc.aio.secure_channel(target, own.credentials(client)) as channel,
    ):
        assert await ask(channel) == "certificate:worker-7.example"
    async with (
        serving(auth, mutual) as target,
        grpc.aio.secure_channel(target, own.credentials(client)) as channel,
    ):
        assert await ask(channel, ("authorization", f"Bearer {TOKEN}")) == "alice", "the token goes first"
