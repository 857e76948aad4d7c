"""Completion of the flags of `vitwire-server`, as the script that typer installs for bash asks for it."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["serve", "--max-budget"], ["--max-budget-tokens"]),
        (["--rpc-p"], ["--rpc-processes"]),
        (["serve", "--conf"], ["--config"]),
        (["serve", "--log-format", "j"], ["json"]),
        (["serve", "--no-such"], []),
    ],
)
def test_flags_are_completed(words: list[str], completed: list[str]) -> None:
    asked = {"COMP_WORDS": " ".join(["vitwire-server", *words]), "COMP_CWORD": str(len(words))}
    environment = os.environ | asked | {"_VITWIRE_SERVER_COMPLETE": "complete_bash"}
    command = [sys.executable, "-m", "vitwire_server"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == completed
