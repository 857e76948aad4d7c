"""Servers of tests are forked, whatever tests before them did to the environment."""

import os

import pytest
from typer.testing import CliRunner

from vitwire._transport import channel as grpc_channel
from vitwire_cli.app import app
from zygote import at_import


def test_clients_and_commands_leave_the_environment_of_imports_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that needs imports of its own takes 6 s of processor time."""
    for name in (grpc_channel._RING_HASH_HEADER, "GRPC_VERBOSITY"):
        monkeypatch.delenv(name, raising=False)
    before = at_import(os.environ)
    grpc_channel.routed_options()
    CliRunner().invoke(app, ["--help"])
    monkeypatch.setenv("GRPC_VERBOSITY", "NONE")  # as the console script does
    assert os.environ.keys() >= {grpc_channel._RING_HASH_HEADER, "GRPC_VERBOSITY"}
    assert at_import(os.environ) == before
