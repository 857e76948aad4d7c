"""The event loop that waits for launches, with a lock that reports who waits for it."""

import asyncio
from threading import Event, Thread

import pytest

from vitwire_server.process import yielding
from vitwire_server.process.yielding import YieldingLoop


class Watched:
    """A loop in a thread of its own, and the calls that it ran."""

    def __init__(self) -> None:
        self.loop = YieldingLoop()
        self.order: list[str] = []
        self.ran = Event()
        self._thread = Thread(target=self._run)

    def __enter__(self) -> "Watched":
        self.loop.call_soon(self.ran.set)
        self._thread.start()
        assert self.ran.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(60)
        self.loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def call(self, name: str) -> Event:
        """Have the loop note a name; the event is set once it did."""
        noted = Event()

        def note() -> None:
            self.order.append(name)
            noted.set()

        self.loop.call_soon_threadsafe(note)
        return noted


def test_nothing_runs_during_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yielding, "_SECONDS", 60)
    asked = Event()
    with Watched() as watched:
        launching = watched.loop.launching

        class Reporting:
            """The lock, which reports a thread that asks for it."""

            def locked(self) -> bool:
                return launching.locked()

            def acquire(self, *, timeout: float) -> bool:
                asked.set()
                return launching.acquire(timeout=timeout)

            def release(self) -> None:
                launching.release()

        monkeypatch.setattr(watched.loop._selector, "_launching", Reporting())
        with launching:
            noted = watched.call("ran")
            assert asked.wait(60), "the loop woke up and waits"
            watched.order.append("launched")
        assert noted.wait(60)
    assert watched.order == ["launched", "ran"]


def test_a_long_launch_holds_the_loop_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yielding, "_SECONDS", 0.001)
    with Watched() as watched:
        with watched.loop.launching:
            assert watched.call("first").wait(60)
            monkeypatch.setattr(yielding, "_SECONDS", 3600)  # a second wait would not end
            assert watched.call("second").wait(60)
        monkeypatch.undo()
        assert watched.call("afterwards").wait(60)
    assert watched.order == ["first", "second", "afterwards"]
