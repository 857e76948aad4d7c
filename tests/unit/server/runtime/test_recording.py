"""The mark of a thread that records a forward."""

from threading import Thread

import pytest
import torch

from vitwire_server.runtime.recording import is_recording, read_beside, recording


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
