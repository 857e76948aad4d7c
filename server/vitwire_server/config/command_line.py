"""The command line of `vitwire-server serve`: its flags under headings, and their completion by shells."""

import sys
from argparse import SUPPRESS, Action, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from difflib import get_close_matches
from inspect import cleandoc
from typing import Any, NoReturn

from pydantic_settings import CliSettingsSource

from vitwire_server.config.settings import ServeSettings, UsageError

_HEADINGS = {next(iter(each.__annotations__)): each.__doc__ for each in ServeSettings.__bases__}
"""Headings by the field that is the first under each."""


def source_of(settings: type[ServeSettings]) -> CliSettingsSource[Any]:
    """Reads these settings from flags. Parsing raises UsageError."""
    return CliSettingsSource(
        settings,
        root_parser=_Parser(),
        parse_args_method=_Parser.parse_args,
        add_argument_method=_Parser.add_setting,
    )


class _Parser(ArgumentParser):
    """A parser whose errors are UsageErrors of one line."""

    def __init__(self) -> None:
        super().__init__(
            "vitwire-server serve",
            usage="vitwire-server serve --model MODEL [FLAGS]",
            description=cleandoc(ServeSettings.__doc__ or ""),
            formatter_class=RawDescriptionHelpFormatter,
        )
        self._group = self.add_argument_group("configuration")
        self._group.add_argument("--config", metavar="FILE", default=SUPPRESS, help="TOML file with settings")

    def add_setting(self, *names: str, **details: Any) -> Action:  # noqa: ANN401 - those of argparse
        """Add a flag under its heading; the order of the fields is that of the flags."""
        if heading := _HEADINGS.get(names[-1].removeprefix("--").replace("-", "_")):
            self._group = self.add_argument_group(heading)
        return self._group.add_argument(*names, **details)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Namespace:  # type: ignore[override] # noqa: ANN401
        """As `ArgumentParser.parse_args`. Raises UsageError."""
        parsed: Namespace
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(self._unknown(unknown[0]))
        return parsed

    def error(self, message: str) -> NoReturn:
        """Raises UsageError."""
        raise UsageError(message.removeprefix("argument ").replace("ignored explicit argument", "takes no value, got"))

    def _unknown(self, word: str) -> str:
        if not word.startswith("-"):
            return f"unexpected argument {word}; vitwire-server serve --help lists the flags"
        flag = word.partition("=")[0]
        close = get_close_matches(flag, self._option_string_actions, n=1)
        meant = f"did you mean {close[0]}?" if close else "vitwire-server serve --help lists all"
        return f"unknown flag {flag}; {meant}"


def complete(words: Sequence[str]) -> int:
    """Print a script by which a shell completes commands and the flags of `serve`, which needs no name."""
    import shtab  # noqa: PLC0415 - each command loads what it needs

    parser = ArgumentParser("vitwire-server completion", description="Print a script for completion by a shell.")
    parser.add_argument("shell", choices=shtab.SUPPORTED_SHELLS, help='load it with: eval "$(%(prog)s bash)"')
    shell = parser.parse_args(words).shell
    serving = source_of(ServeSettings).root_parser
    serving.prog, serving.usage = "vitwire-server", None
    serving.add_argument(
        "command", nargs="?", choices=("serve", "download", "demo-checkpoint", "budgets", "completion")
    )
    sys.stdout.write(shtab.complete(serving, shell) + "\n")
    return 0
