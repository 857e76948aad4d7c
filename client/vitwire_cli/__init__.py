"""The command line `vitwire`, above client and gateway: encode files, benchmark a server, show its model, serve.

Imports take tenths of a second. During them, Ctrl-C has the system's default action, which ends the process without a
traceback.
"""

import os
import signal
import sys

_EXTRA_OF = {"router": "router", "sglang-encoder": "sglang"}
"""Extras of commands that need more than `cli`."""


def main() -> None:
    """Run the command line on `sys.argv`; ends in SystemExit. The console script `vitwire`."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # unless nohup set it to be ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # gRPC reads it when it is imported; else its core logs each failed attempt to connect.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        from vitwire_cli.app import run  # noqa: PLC0415  # needs the packages of the extra [cli], and time

        run()
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if not missing or missing.startswith("vitwire"):
            raise
        from vitwire.shared.extras import remedy  # noqa: PLC0415  # as above

        command = next((each for each in sys.argv[1:] if not each.startswith("-")), "")
        print(f"vitwire: {missing} is not installed; {remedy(_EXTRA_OF.get(command, 'cli'))}", file=sys.stderr)
        raise SystemExit(1) from None
