"""Fixtures that several files of this folder share."""

from pathlib import Path

import pytest

from entered import entered
from routers import EngineProcess, client_of, engine, router

stand_in = entered(engine)


@pytest.fixture(scope="module")
def fault(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is written here breaks the engine, see `faulty_server.py`."""
    return tmp_path_factory.mktemp("faults") / "fault"


@pytest.fixture(scope="module")
def unix_socket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short path that is free."""
    return tmp_path_factory.mktemp("socket") / "s"


@pytest.fixture
def received(stand_in: EngineProcess) -> EngineProcess:
    """The engine, with nothing recorded."""
    stand_in.requests()
    return stand_in


proxy = entered(lambda server: router(server.target, None, "--max-images", "32"))
"""A router without an engine in front of the module's server, unless the module has another."""

client = entered(client_of, scope="function")
