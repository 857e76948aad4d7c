"""The mark of a thread that records a forward, and captures."""

import gc
from threading import Thread
from typing import Any

import pytest
import torch

from vitwire_server.runtime.recording import captured, is_recording, read_beside, recording


class Graph:
    """Stands for a CUDA graph, which needs a device."""

    begun = ended = 0

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        assert (pool, capture_error_mode) == (None, "thread_local")
        self.begun += 1

    def capture_end(self) -> None:
        assert not gc.isenabled()
        self.ended += 1


def fail() -> None:
    with recording():
        read_beside().append(torch.zeros(1))
        assert len(read_beside()) == 1
        raise RuntimeError("injected")


def test_a_recording_that_fails_leaves_no_tensors_to_the_next() -> None:
    with pytest.raises(RuntimeError, match="injected"):
        fail()
    assert not is_recording()
    with recording():
        assert read_beside() == []


def test_a_recording_is_of_one_thread() -> None:
    seen: list[object] = []
    with recording():
        read_beside().append(torch.zeros(1))
        thread = Thread(target=lambda: seen.extend([is_recording(), read_beside()]))
        thread.start()
        thread.join()
        assert is_recording()
    assert seen == [False, []]


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
