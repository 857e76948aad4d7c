"""The mark of a thread that records a forward, and captures."""

import gc
import weakref
from threading import Thread
from typing import Any

import pytest
import torch

from vitwire_server.runtime.graph_recording import captured, is_recording, join, read_beside, recording


class Graph:
    """Stands for a CUDA graph, which needs a device."""

    begun = ended = 0

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        assert (pool, capture_error_mode) == (None, "thread_local")
        self.begun += 1

    def capture_end(self) -> None:
        assert not gc.isenabled()
        self.ended += 1


def fail(rows: list[torch.Tensor], stream: Any) -> None:
    with recording():
        read_beside(rows.pop(), stream)
        raise RuntimeError("injected")


def test_a_recording_that_fails_leaves_nothing_to_join() -> None:
    rows = [torch.zeros(1)]
    kept = weakref.ref(rows[0])
    with pytest.raises(RuntimeError, match="injected"):
        fail(rows, object())
    assert kept() is None
    assert not is_recording()
    join()  # would fail on the stream


def test_a_recording_is_of_one_thread() -> None:
    stream: Any = object()
    rows = torch.zeros(1)
    kept = weakref.ref(rows)
    seen: list[bool] = []

    def other() -> None:
        seen.append(is_recording())
        join()  # would fail on the stream of the other recording
        with recording():
            seen.append(is_recording())

    with recording():
        read_beside(rows, stream)
        del rows
        thread = Thread(target=other)
        thread.start()
        thread.join()
        assert is_recording()
        assert kept() is not None
    assert seen == [False, True]


@pytest.mark.parametrize("error", [None, RuntimeError("injected")])
def test_no_garbage_is_collected_during_a_capture(error: Exception | None) -> None:
    graph: Any = Graph()
    try:
        with captured(graph):
            assert not gc.isenabled()
            if error:
                raise error
    except RuntimeError as raised:
        assert raised is error
    assert gc.isenabled()
    assert (graph.begun, graph.ended) == (1, 1)
