"""Fixtures that tests of the router share."""

from collections.abc import Iterator

import pytest
from openai import OpenAI

from routers import EngineProcess, RouterProcess, client_of, engine, router
from servers import ServerProcess


@pytest.fixture(scope="module")
def stand_in() -> Iterator[EngineProcess]:
    with engine() as process:
        yield process


@pytest.fixture
def received(stand_in: EngineProcess) -> EngineProcess:
    """The engine, with nothing recorded."""
    stand_in.requests()
    return stand_in


@pytest.fixture(scope="module")
def proxy(server: ServerProcess) -> Iterator[RouterProcess]:
    """A router without an engine in front of the module's server, unless the module has another."""
    with router(server.target, None, "--max-images", "32") as process:
        yield process


@pytest.fixture
def client(proxy: RouterProcess) -> Iterator[OpenAI]:
    with client_of(proxy) as one:
        yield one
