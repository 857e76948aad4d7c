"""Requests of one message are read by the thread that sends them, and gRPC keeps nothing of those that end early."""

import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from fake_service import Fake, item, serving
from vitwire import Client, DeadlineExceeded
from vitwire._transport import calls, channel, unary_streams


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls that the client drained."""
    seen: list[Any] = []

    def drain(call: object) -> None:
        unary_streams_drain(call)
        seen.append(call)

    unary_streams_drain = unary_streams.drain
    monkeypatch.setattr(calls.unary_streams, "drain", drain)
    return seen


def test_no_thread_is_started_for_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise AssertionError("a thread of the channel")

    with serving(Fake()) as running, Client(running.target, timeout=100) as client:
        client.model()
        monkeypatch.setattr("grpc._channel._run_channel_spin_thread", refuse)
        assert len(client.encode([item(), item()])) == 2


def test_nothing_is_left_of_a_call_that_its_caller_leaves(ended: list[Any]) -> None:
    with serving(Fake()) as running, Client(running.target, timeout=100) as client:
        for _ in client.iter_encode([item(), item()]):
            break
        (call,) = ended
        assert call.cancelled()
        assert not call._state.due


def test_nothing_is_left_of_a_call_that_fails(ended: list[Any]) -> None:
    fake = Fake()
    with serving(fake) as running, Client(running.target, timeout=100, max_retries=0) as client:
        client.model()
        fake.before = lambda context: context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "as asked")
        with pytest.raises(DeadlineExceeded):
            client.encode([item()])
        assert ended
        assert not any(call._state.due for call in ended)


@pytest.mark.parametrize("while_handling", [False, True])
def test_a_call_that_is_not_accepted_is_cancelled_and_sent_again(ended: list[Any], *, while_handling: bool) -> None:
    silent = threading.Event()

    def answer_the_second(responses: Iterator[Any]) -> Iterator[Any]:
        if not silent.is_set():
            silent.set()
            time.sleep(2)
        yield from responses

    fake = Fake()
    with serving(fake) as running, Client(running.target) as client:
        client.model()
        fake.bend = answer_the_second
        try:
            if while_handling:
                raise LookupError
        except LookupError:
            assert len(client.encode([item()], timeout=3)) == 1
        else:
            assert len(client.encode([item()], timeout=3)) == 1  # a third of the timeout, then again
    assert fake.methods.count("Encode") == 2
    assert [call.cancelled() for call in ended] == [True, False]
    assert not any(call._state.due for call in ended)


@pytest.mark.parametrize("step", ["serializer", "deserializer"])
def test_a_callers_error_in_a_message_ends_the_call(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def fail(_: object) -> None:
        raise MemoryError

    ended = threading.Event()

    def answer_slowly(responses: Iterator[Any]) -> Iterator[Any]:
        yield next(responses)
        ended.wait(20)
        yield from responses

    def before(context: grpc.ServicerContext) -> None:
        context.add_callback(ended.set)

    fake = Fake(bend=answer_slowly)
    with serving(fake) as running, Client(running.target, timeout=100) as client:
        client.model()
        fake.before = before
        monkeypatch.setattr(channel, "ENCODE", channel.ENCODE._replace(**{step: fail}))
        started = time.monotonic()
        with pytest.raises(MemoryError):
            client.encode([item(), item()])
        assert time.monotonic() - started < 5
        assert step == "serializer" or ended.wait(5)


def test_an_interrupt_ends_a_call_and_leaves_the_client_usable() -> None:
    def wait(context: grpc.ServicerContext) -> None:
        while context.is_active():
            time.sleep(0.01)

    fake = Fake()
    with serving(fake) as running, Client(running.target) as client:
        client.model()
        fake.before = wait
        interrupt = threading.Timer(0.3, lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT))
        interrupt.start()
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            client.encode([item()])
        assert time.monotonic() - started < 5
        fake.before = lambda _: None
        assert len(client.encode([item()])) == 1
        started = time.monotonic()
        client.close()
        assert time.monotonic() - started < 3
