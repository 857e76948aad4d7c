"""Completion of `vitwire-server` by a real bash."""

import subprocess

import pytest

from vitwire_server.config.command_line import complete

_COMPLETED = """
source /dev/stdin
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMP_LINE="$*"
_shtab_vitwire_server
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["serve", "--max-budget"], ["--max-budget-tokens"]),
        (["--rpc-p"], ["--rpc-processes"]),
        (["serve", "--conf"], ["--config"]),
        (["dem"], ["demo-checkpoint"]),
        (["serve", "--no-such"], [""]),
    ],
)
def test_bash_completes(words: list[str], completed: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert complete(["bash"]) == 0
    script = capsys.readouterr().out
    command = ["bash", "-c", _COMPLETED, "bash", "vitwire-server", *words]
    done = subprocess.run(command, input=script, capture_output=True, text=True, check=True)
    assert done.stdout.rstrip("\n").split("\n") == completed
