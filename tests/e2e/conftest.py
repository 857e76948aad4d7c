"""Fixtures that tests of the router share."""

from collections.abc import Iterator

import pytest

from routers import EngineProcess, engine


@pytest.fixture(scope="module")
def stand_in() -> Iterator[EngineProcess]:
    with engine() as process:
        yield process


@pytest.fixture
def received(stand_in: EngineProcess) -> EngineProcess:
    """The engine, with nothing recorded."""
    stand_in.requests()
    return stand_in
