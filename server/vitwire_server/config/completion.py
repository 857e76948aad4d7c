"""`vitwire-server completion SHELL`: a script by which a shell completes commands and flags."""

import sys
from argparse import ArgumentParser
from collections.abc import Sequence

import shtab

from vitwire_server.config.parser import source_of
from vitwire_server.config.settings import ServeSettings

COMMANDS = ("serve", "download", "demo-checkpoint", "budgets", "completion")


def main(words: Sequence[str]) -> int:
    """Print the script. The flags are those of `serve`, which is the command that needs no name."""
    parser = ArgumentParser("vitwire-server completion", description=__doc__)
    parser.add_argument("shell", choices=shtab.SUPPORTED_SHELLS, help='load it with: eval "$(%(prog)s bash)"')
    shell = parser.parse_args(words).shell
    serving = source_of(ServeSettings).root_parser
    serving.prog, serving.usage = "vitwire-server", None
    serving.add_argument("command", nargs="?", choices=COMMANDS)
    sys.stdout.write(shtab.complete(serving, shell) + "\n")
    return 0
