"""Completion of `vitwire-server` by a real bash."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

_COMPLETED = """
source /dev/stdin
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMP_LINE="$*"
_vitwire_server_completion "$1"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script() -> str:
    command = [sys.executable, "-m", "vitwire_server", "completion", "bash"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["serve", "--max-budget"], ["--max-budget-tokens"]),
        (["--rpc-p"], ["--rpc-processes"]),
        (["serve", "--conf"], ["--config"]),
        (["serve", "--log-format", "j"], ["json"]),
        (["dem"], ["demo-checkpoint"]),
        (["serve", "--no-such"], [""]),
    ],
)
def test_bash_completes(words: list[str], completed: list[str], script: str) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = ["bash", "-c", _COMPLETED, "bash", "vitwire-server", *words]
    environment = os.environ | {"PATH": path}
    done = subprocess.run(command, input=script, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.rstrip("\n").split("\n") == completed


def test_an_unknown_shell_is_named() -> None:
    command = [sys.executable, "-m", "vitwire_server", "completion", "tcsh"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "Shell tcsh not supported.\n")
