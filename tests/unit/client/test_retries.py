"""What both clients send again, how long they wait, and what they refuse to connect to."""

import threading
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from both_clients import Call, both, large
from fake_service import Fake, Running, abort, expected, item, retry_info, serving
from http2 import CANCEL, ENHANCE_YOUR_CALM, resetting
from vitwire import AsyncClient, Client, InvalidItem, Item, Overloaded, Unavailable
from vitwire._transport.attempts import Deadline


@both
async def test_a_full_server_is_asked_again_when_it_said(make: Call, running: Running) -> None:
    refusals = 2

    def refuse(context: grpc.ServicerContext) -> None:
        nonlocal refusals
        if refusals:
            refusals -= 1
            abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, retry_info(0, 200_000_000))

    async with make(running.target, timeout=20) as client:
        await client.model()
        running.fake.before = refuse
        await client.encode([item()])
        assert running.fake.methods.count("Encode") == 3
        refusals = 10**9
        with pytest.raises(Overloaded):
            await client.encode([item()], timeout=1)
    refusals = 3
    async with make(running.target, timeout=20, max_retries=2) as client:
        with pytest.raises(Overloaded):
            await client.model()


@both
async def test_a_large_message_is_sent_to_a_full_server_as_a_stream(make: Call, running: Running) -> None:
    """The server takes a receive slot back from a message that is slow to arrive; a stream needs none."""

    def refuse(context: grpc.ServicerContext) -> None:
        if running.fake.methods.count("EncodeStream") == 0:
            abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, retry_info(0, 100_000_000))

    medium = Item(np.full((16, 1 << 14), 3.0, np.float32), (1, 8, 2))  # 1 MiB
    async with make(running.target, timeout=20, max_retries=1) as client:
        await client.model()
        running.fake.before = refuse
        (embedding,) = await client.encode([medium])
    assert running.fake.methods == ["GetModel", "Encode", "EncodeStream"]
    np.testing.assert_array_equal(embedding.numpy(), expected(4, 3.0))


@both
async def test_only_what_was_not_answered_is_sent_again(client: Any, running: Running) -> None:
    sizes: list[int] = []

    def break_off(responses: Iterator[Any]) -> Iterator[Any]:
        answers = list(responses)
        sizes.append(sum(answer.chunk.last for answer in answers))
        yield from answers[:2] if len(sizes) == 1 else answers
        if len(sizes) == 1:
            raise ConnectionAbortedError

    running.fake.bend = break_off
    embeddings = await client.encode([item(2), item(3), item(4, 9.0)])
    assert sizes == [3, 2]
    assert [each.shape[0] for each in embeddings] == [2, 3, 4]
    np.testing.assert_array_equal(embeddings[2].numpy(), expected(4, 9.0))


@both
async def test_a_server_that_dies_after_its_last_answer_has_answered(client: Any, running: Running) -> None:
    def break_off(responses: Iterator[Any]) -> Iterator[Any]:
        yield from responses
        raise ConnectionAbortedError

    running.fake.bend = break_off
    (embedding,) = await client.encode([item(2, 9.0)])
    (streamed,) = await client.encode([large()])
    np.testing.assert_array_equal(embedding.numpy(), expected(2, 9.0))
    assert streamed.shape[0] == 4
    assert running.fake.methods == ["GetModel", "Encode", "EncodeStream"], "no request without items"


@both
async def test_the_model_is_kept_unless_the_error_may_speak_of_another(make: Call, running: Running) -> None:
    async with make(running.target, timeout=20, max_retries=0) as client:
        for code, asked in ((grpc.StatusCode.UNAVAILABLE, 1), (grpc.StatusCode.INVALID_ARGUMENT, 2)):
            running.fake.before = lambda context: None
            await client.encode([item()])
            running.fake.before = lambda context, code=code: abort(context, code)
            with pytest.raises((Unavailable, InvalidItem)):
                await client.encode([item()])
            running.fake.before = lambda context: None
            await client.encode([item()])
            assert running.fake.methods.count("GetModel") == asked


@both
async def test_a_dead_port_is_named_within_a_short_timeout(make: Call) -> None:
    async with make("127.0.0.1:1", timeout=1) as client:
        for call in (client.model, client.health):
            with pytest.raises(Unavailable, match=r"[Cc]onnection refused"):
                await call()


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("ipv4:localhost:5", "dns:///name:port"),
        ("http://localhost:5", "is a URL"),
        ("127.0.0.1:99999", "'99999' is not a port"),
        ("localhost:http2", "'http2' is not a port"),
        ("dns:///", "no host"),
        ("", "no host"),
    ],
)
def test_a_wrong_target_is_a_clear_error(kind: Any, target: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        kind(target)


def test_a_timeout_that_nobody_gave_fits_the_work() -> None:
    small, huge = (
        Deadline(None, 60).covering([item()], patient=False),
        Deadline(None, 60).covering([large()] * 9, patient=True),
    )
    assert 60 < (small.left() or 0) < 61
    assert (huge.left() or 0) > 600 + 9 * 16 * 0.02
    assert Deadline(5, 60).covering([large()] * 9, patient=True).left() == pytest.approx(5, abs=1)
    assert Deadline(float("inf"), 60).left() is None


def test_a_client_closes_after_an_interrupt_in_the_start_of_an_rpc(monkeypatch: pytest.MonkeyPatch) -> None:
    """grpc would wait without end for a call whose events nobody fetches."""
    with serving(Fake()) as running:
        client = Client(running.target, timeout=20)
        client.model()

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("grpc._channel._SingleThreadedRendezvous", interrupted)
        monkeypatch.setattr("vitwire._transport.calls._CLOSE_SECONDS", 0.1)
        with pytest.raises(KeyboardInterrupt):
            client.encode([item()])
        closing = threading.Thread(target=client.close, daemon=True)
        closing.start()
        closing.join(10)
        assert not closing.is_alive()


@both
@pytest.mark.parametrize("code", [CANCEL, ENHANCE_YOUR_CALM])
async def test_what_a_proxy_resets_is_sent_again(make: Call, code: int) -> None:
    """gRPC calls it CANCELLED or RESOURCE_EXHAUSTED, as if the caller had left or the server had answered."""
    fake = Fake()
    with serving(fake) as running, resetting(running.target, code) as proxy:
        async with make(proxy.target, timeout=60) as client:
            await client.model()
            for sent in (Item(np.full((16, 64), 3.0, np.float32), (1, 8, 2)), large()):
                proxy.resets = 2
                (embedding,) = await client.encode([sent])
                assert embedding.shape[0] == 4
                assert proxy.resets == 0
        async with make(proxy.target, timeout=60, max_retries=0) as client:
            await client.model()
            proxy.resets = 1
            with pytest.raises(Unavailable, match="RST_STREAM") as raised:
                await client.encode([Item(np.full((16, 64), 3.0, np.float32), (1, 8, 2))])
            assert raised.value.code == "UNAVAILABLE"


@both
async def test_what_a_server_cancels_is_sent_again(client: Any, running: Running) -> None:
    """gRPC's server does so with calls that wait behind too many others."""
    left = {"Encode": 2, "EncodeStream": 2, "GetModel": 2}

    def cancel(context: grpc.ServicerContext) -> None:
        method = running.fake.methods[-1]
        left[method] -= 1
        if left[method] >= 0:
            context.abort(grpc.StatusCode.CANCELLED, "CANCELLED")

    running.fake.before = cancel
    for sent in (item(), large()):
        await client.encode([sent])
    assert max(left.values()) < 0, "after two attempts of each came a third"
