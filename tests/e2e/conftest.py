"""Fixtures that several files of this folder share."""

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from certificates import Authority
from entered import entered
from load import UNLIMITED
from routers import EngineProcess, client_of, engine, router
from servers import ServerProcess
from vitwire.v1.encoder_pb2_grpc import EncoderServiceStub

stand_in = entered(engine)


@pytest.fixture(scope="module")
def unix_socket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short path that is free."""
    return tmp_path_factory.mktemp("socket") / "s"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("own") / "pki").issue()


@pytest.fixture
def stub(server: ServerProcess) -> Iterator[EncoderServiceStub]:
    """The generated stub of the module's server: plain protobuf, as any other client speaks it."""
    with grpc.insecure_channel(server.target, UNLIMITED) as channel:
        yield EncoderServiceStub(channel)


@pytest.fixture
def received(stand_in: EngineProcess) -> EngineProcess:
    """The engine, with nothing recorded."""
    stand_in.requests()
    return stand_in


proxy = entered(lambda server: router(server.target, None, "--max-images", "32"))
"""A router without an engine in front of the module's server, unless the module has another."""

client = entered(client_of, scope="function")
