"""Defaults, limits and metadata of both clients; what identifies a request; clean-up."""

import asyncio
import logging
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from both_clients import Call, InThread, both
from fake_service import Running, abort, expected, item, retry_info
from servers import finished
from vitwire import (
    AsyncClient,
    Client,
    DeadlineExceeded,
    Embedding,
    InvalidItem,
    Item,
    NotCached,
    Overloaded,
    Report,
    Unavailable,
    VitwireError,
)
from vitwire.v1 import encoder_pb2 as pb

SECRET = "wolpertinger"  # of the tests


# -- defaults ---------------------------------------------------------------------------------------


@both
async def test_options_are_those_of_the_call_else_of_the_client(make: Call, running: Running) -> None:
    async with make(running.target, timeout=20, output_type="float32", priority="batch") as client:
        assert (await client.encode([item()]))[0].dtype == "float32"
        assert (await client.encode([item()], output_type="float16", priority="interactive"))[0].dtype == "float16"
        derived = client.with_options(output_type="bfloat16", priority="interactive")
        await derived.encode([item()])
        await client.with_options().encode([item()])
    assert running.fake.options == [
        (pb.DATA_TYPE_FLOAT32, pb.PRIORITY_BATCH),
        (pb.DATA_TYPE_FLOAT16, pb.PRIORITY_INTERACTIVE),
        (pb.DATA_TYPE_BFLOAT16, pb.PRIORITY_INTERACTIVE),
        (pb.DATA_TYPE_FLOAT32, pb.PRIORITY_BATCH),
    ]
    assert running.fake.methods.count("GetModel") == 1, "derived clients share what is known of the model"


@both
async def test_a_derived_client_has_its_own_timeout_and_retries(make: Call, running: Running) -> None:
    def refuse(context: grpc.ServicerContext) -> None:
        if running.fake.methods[-1] != "GetModel":
            abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, retry_info(0, 10_000_000))

    running.fake.before = refuse
    async with make(running.target, timeout=20, max_retries=0) as client:
        for retries, derived in ((0, client), (2, client.with_options(max_retries=2))):
            running.fake.methods.clear()
            with pytest.raises(Overloaded):
                await derived.encode([item()])
            assert running.fake.methods.count("Encode") == 1 + retries
        with pytest.raises(DeadlineExceeded):
            await client.with_options(timeout=0.0).encode([item()])


@both
async def test_closing_a_derived_client_leaves_the_first_one_open(make: Call, running: Running) -> None:
    client = make(running.target, timeout=20)
    async with client.with_options(timeout=5) as derived:
        await derived.encode([item()])
    assert not client.is_closed
    await client.encode([item()])
    await client.close()
    await client.close()
    assert client.is_closed
    assert derived.is_closed
    for closed in (client, derived, client.with_options()):
        with pytest.raises(RuntimeError, match="the client is closed"):
            await closed.encode([item()])
        with pytest.raises(RuntimeError, match="the client is closed"):
            await closed.health()


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"priority": "urgent"}, "priority"),
        ({"output_type": "uint8"}, "output_type"),
        ({"timeout": float("nan")}, "timeout"),
        ({"max_retries": -1}, "max_retries"),
        *(({"spread": wrong}, "spread must be at least 1 or 'auto'") for wrong in (0, -1, "all")),
        *(
            ({"metadata": {name: "1"}}, "metadata")
            for name in ("grpc-timeout", "x-trace-bin", "a b", "", 1, "x-vitwire-acknowledge")
        ),
        *(({"metadata": wrong}, "metadata") for wrong in ({"x": "a\nb"}, {"x": 1}, {"Authorization": SECRET})),
    ],
)
def test_invalid_options_are_refused_at_once(kind: Any, options: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        kind("localhost:1", token="x", **options)
    with pytest.raises(ValueError, match=field) as raised:
        kind("localhost:1", token="x").with_options(**options)
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("limit", ["connections", "max_in_flight"])
def test_a_limit_below_one_is_refused(kind: Any, limit: str) -> None:
    with pytest.raises(ValueError, match=f"{limit} must be at least 1, got 0"):
        kind("localhost:1", **{limit: 0})


# -- metadata and request ids ------------------------------------------------------------------------


@both
async def test_metadata_is_sent_with_every_request(make: Call, running: Running) -> None:
    async with make(running.target, timeout=20, token=SECRET, metadata={"X-Tenant": "a", "x-team": "b"}) as client:
        await client.model()
        assert running.fake.metadata["x-tenant"] == "a"
        assert running.fake.metadata["authorization"] == f"Bearer {SECRET}"
        await client.with_options(metadata={"x-tenant": "c"}).encode([item()])
        assert (running.fake.metadata["x-tenant"], running.fake.metadata["x-team"]) == ("c", "b")
        (embedding,) = await client.with_options(metadata={"x-request-id": "mine-1"}).encode([item()])
        assert running.fake.metadata["x-request-id"] == embedding.report.request_id == "mine-1"
    async with make(running.target, timeout=20, metadata={"authorization": "Basic x"}) as client:
        await client.encode([item()])
        assert running.fake.metadata["authorization"] == "Basic x"


@both
async def test_a_token_may_come_from_a_function(make: Call, running: Running) -> None:
    tokens = iter(["first", "second", "third\n"])
    async with make(running.target, timeout=20, token=lambda: next(tokens)) as client:
        await client.model()
        assert running.fake.metadata["authorization"] == "Bearer first"
        await client.encode([item()])
        assert running.fake.metadata["authorization"] == "Bearer second"
        with pytest.raises(ValueError, match="printable ASCII") as raised:
            await client.encode([item()])
    assert "third" not in str(raised.value)
    with pytest.raises(ValueError, match="printable ASCII") as raised:
        make(running.target, token=f"{SECRET}\n")
    assert SECRET not in str(raised.value)


@both
async def test_options_of_grpc_replace_those_of_the_client(make: Call, running: Running) -> None:
    options = {"grpc.primary_user_agent": "probe/1", "grpc.keepalive_time_ms": 60_000}
    async with make(running.target, timeout=20, channel_options=options) as client:
        await client.encode([item()])
        assert running.fake.metadata["user-agent"].startswith("probe/1 ")
        await client.encode([item() for _ in range(20)])


@both
async def test_results_and_errors_have_the_id_of_their_request(make: Call, running: Running) -> None:
    async with make(running.target, timeout=20) as client:
        first, second = await client.encode([item(), item()])
        assert first.report.request_id == second.report.request_id == running.fake.metadata["x-request-id"]
        with pytest.raises(NotCached) as raised:
            await client.encode([item(), item(content_id="error:NOT_FOUND")])
        assert raised.value.request_id == running.fake.metadata["x-request-id"] != first.report.request_id
        results = [
            each async for _, each in client.iter_encode([item(content_id="error:INTERNAL")], return_exceptions=True)
        ]
        assert results[0].request_id == running.fake.metadata["x-request-id"]
        running.fake.before = lambda context: abort(context, grpc.StatusCode.INVALID_ARGUMENT)
        with pytest.raises(InvalidItem) as refused:
            await client.encode([item()])
        assert refused.value.request_id == running.fake.metadata["x-request-id"]
        running.fake.before = lambda context: abort(context, grpc.StatusCode.INTERNAL, x_request_id="of-the-server")
        with pytest.raises(VitwireError) as failed:
            await client.encode([item()])
        assert failed.value.request_id == "of-the-server"
    async with make("localhost:1", max_retries=0) as client:
        for call in (client.model(), client.health(), client.encode([item()])):
            with pytest.raises(Unavailable) as unavailable:
                await call
            assert (unavailable.value.code, len(unavailable.value.request_id or "")) == ("UNAVAILABLE", 32)
    with pytest.raises(InvalidItem) as local:
        Item(np.zeros(3), (1, 1, 1))
    assert local.value.request_id is None


# -- requests in flight ------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("limit", [1, 3])
async def test_requests_in_flight_are_bounded(make: Call, limit: int, running: Running) -> None:
    lock, most, now = threading.Lock(), 0, 0
    full, release = threading.Event(), threading.Event()

    def counted(responses: Iterator[Any]) -> Iterator[Any]:
        nonlocal most, now
        with lock:
            now += 1
            most = max(most, now)
        if now >= limit:
            full.set()
        release.wait(60)
        yield from responses
        with lock:
            now -= 1

    running.fake.bend = counted
    async with make(running.target, timeout=60, max_in_flight=limit) as client:
        await client.model()
        calls = [asyncio.ensure_future(client.with_options().encode([item()])) for _ in range(limit + 1)]
        assert await asyncio.to_thread(full.wait, 60)
        with pytest.raises(DeadlineExceeded, match=f"max_in_flight={limit}"):
            await client.encode([item()], timeout=0.2)
        release.set()
        for done in await asyncio.gather(*calls):
            np.testing.assert_array_equal(done[0].numpy(), expected(4, 1.0))
        await client.encode([item()])
    assert most == limit


@both
async def test_a_slot_is_free_again_after_an_error_and_an_abandoned_loop(make: Call, running: Running) -> None:
    async with make(running.target, timeout=20, max_in_flight=1) as client:
        with pytest.raises(NotCached):
            await client.encode([item(content_id="error:NOT_FOUND")])
        results = client.iter_encode([item(), item(), item()])
        async for _ in results:
            break
        await results.aclose()
        assert len([each async for each in client.iter_encode(item() for _ in range(40))]) == 40
        await client.encode([item()])


@both
async def test_a_request_that_waits_for_its_own_loop_logs_a_warning(
    make: Call, running: Running, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitwire._transport.slots._WARN_SECONDS", 0.2)
    async with make(running.target, max_in_flight=1) as client:
        results = client.iter_encode([item(), item()])
        async for _ in results:
            break
        waiting = asyncio.ensure_future(client.encode([item()]))
        async with asyncio.timeout(30):
            while "max_in_flight=1 other requests are in flight" not in caplog.text:  # noqa: ASYNC110 - until it is
                await asyncio.sleep(0.02)
        await results.aclose()
        await waiting


# -- logs, repr, pickles -----------------------------------------------------------------------------


@both
async def test_retries_and_requests_are_logged(make: Call, caplog: pytest.LogCaptureFixture, running: Running) -> None:
    def refuse(context: grpc.ServicerContext) -> None:
        if running.fake.methods.count("Encode") == 1:
            abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, retry_info(0, 10_000_000))

    running.fake.before = refuse
    caplog.set_level(logging.DEBUG, "vitwire")
    async with make(running.target, timeout=20, token=SECRET) as client:
        (embedding,) = await client.encode([item()])
    name = embedding.report.request_id
    own = [record for record in caplog.records if record.name == "vitwire" and name in record.getMessage()]
    assert [record.levelname for record in own] == ["DEBUG", "INFO", "DEBUG"]
    assert "as asked; sending it again in 0." in own[1].getMessage()
    assert SECRET not in caplog.text


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_repr_has_no_secrets(kind: Any) -> None:
    client = kind("localhost:1", token=SECRET, metadata={"x-api-key": SECRET})
    assert repr(client.with_options(priority="batch")) == f"{kind.__name__}('localhost:1')"
    for part in (client._shared, client._options, client._context(), client._shared.transport):
        assert SECRET not in repr(part)


@both
async def test_a_pickled_client_has_the_same_arguments(make: Call, running: Running) -> None:
    kind = Client if make is InThread else AsyncClient
    client = kind(running.target, timeout=20, token=SECRET, max_in_flight=2).with_options(output_type="float16")
    copy = pickle.loads(pickle.dumps(client))
    assert (type(copy), copy._options) == (kind, client._options)
    if isinstance(copy, Client):
        with copy:
            (embedding,) = copy.encode([item()])
    else:
        async with copy:
            (embedding,) = await copy.encode([item()])
    assert embedding.dtype == "float16"
    assert running.fake.metadata["authorization"] == f"Bearer {SECRET}"
    with pytest.raises(TypeError, match="tls"):
        pickle.dumps(kind("localhost:1", tls=grpc.ssl_channel_credentials()))


def test_items_embeddings_and_errors_can_be_pickled() -> None:
    copy: Any = pickle.loads(pickle.dumps(item(content_id="a", keep_ratio=0.5)))
    np.testing.assert_array_equal(copy.pixels, item().pixels)
    assert (copy.grid, copy.content_id, copy.keep_ratio) == (item().grid, "a", 0.5)
    rows = np.arange(6, dtype="<u2").reshape(2, 3)
    embedding = pickle.loads(pickle.dumps(Embedding(rows, "bfloat16", 0, Report(path="graph", request_id="x"))))
    np.testing.assert_array_equal(
        embedding.torch().view(-1).float(), Embedding(rows, "bfloat16", 0, Report()).torch().view(-1).float()
    )
    assert embedding.report == Report(path="graph", request_id="x")
    for error in (
        Overloaded("full", item=3, request_id="x", retry_after=0.5),
        InvalidItem("bad", violations=[("grid.h", "bad")], request_id="x"),  # type: ignore[list-item]
        Unavailable("gone"),
    ):
        other = pickle.loads(pickle.dumps(error))
        assert type(other) is type(error)
        assert (str(other), vars(other)) == (str(error), vars(error))
        assert repr(other) == repr(error)
    assert repr(Overloaded("full", item=3, request_id="x")) == (
        "Overloaded('full', code='RESOURCE_EXHAUSTED', item=3, request_id='x')"
    )


def test_a_repr_of_an_item_has_no_values() -> None:
    assert repr(item(content_id="a")) == "Item(pixels=float32(16, 6), grid=(1, 8, 2), modality=image, content_id='a')"
    assert len(repr(Item(encoded=bytes(10**6)))) < 100


# -- processes and event loops -----------------------------------------------------------------------

FORKING = """
import os, sys, threading, time
import numpy as np
from vitwire import Client, Item
item = Item(np.ones((4, 6), np.float32), (1, 2, 2))
with Client(sys.argv[1], timeout=60) as client:
    client.encode([item])
    held, forked = threading.Event(), threading.Event()
    def hold():  # as the client's own threads may at any time
        with client._shared.transport._timers._changed, client._shared.transport.connections._lock:
            held.set()
            forked.wait()
    threading.Thread(target=hold).start()
    held.wait()
    child = os.fork()
    if not child:
        start = time.monotonic()
        client.close()
        os.write(1, b"closed" if time.monotonic() - start < 4 else b"slow")
        os._exit(0)
    forked.set()
    os.waitpid(child, 0)
    client.encode([item])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_closing_in_a_forked_process_leaves_the_connections_of_the_other(running: Running) -> None:
    done = finished(running.target, program=("-c", FORKING))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "closed"


def test_an_async_client_is_for_one_event_loop(running: Running) -> None:
    client = AsyncClient(running.target, timeout=20)

    async def encode() -> list[Embedding]:
        return await client.encode([item()])

    with asyncio.Runner() as runner:
        runner.run(encode())
        with asyncio.Runner() as other, pytest.raises(RuntimeError, match="another event loop"):
            other.run(encode())
        runner.run(encode())
        runner.run(client.close())


def test_a_client_that_is_not_closed_leaves_no_trace(running: Running) -> None:
    code = (
        "import sys, numpy as np\nfrom vitwire import Client, Item\n"
        "Client(sys.argv[1], timeout=60).encode([Item(np.ones((4, 6), np.float32), (1, 2, 2))])\nprint('done')"
    )
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", code, running.target],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", ""), done.stderr
