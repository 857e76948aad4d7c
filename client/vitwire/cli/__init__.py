"""The command line `vitwire`: encode files, benchmark a server, show its model and health."""

import sys

from vitwire.shared.extras import remedy

_EXTRAS = frozenset({"click", "rich", "safetensors", "typer"})

_EXTRA_OF = {"router": "router", "sglang-encoder": "sglang"}
"""Of commands that need more than the extra `cli`."""


def main() -> None:
    """Run the command line on `sys.argv`; ends in SystemExit."""
    try:
        from vitwire.cli._app import run  # noqa: PLC0415  # needs the packages of the extra [cli]
    except ImportError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRAS:
            raise
        command = next((each for each in sys.argv[1:] if not each.startswith("-")), "")
        print(f"vitwire: {missing} is not installed; {remedy(_EXTRA_OF.get(command, 'cli'))}", file=sys.stderr)
        raise SystemExit(1) from None
    run()
