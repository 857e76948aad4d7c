"""The console script `vitwire`. It is outside the package `vitwire`, whose imports take tenths of a second.

During these imports, Ctrl-C has the system's default action, which ends the process without a traceback.
"""

import os
import signal


def main() -> None:
    """Run the command line on `sys.argv`; raises SystemExit."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # unless nohup set it to be ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # gRPC reads it when it is imported; else its core writes lines of its own for each failed attempt to connect.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from vitwire.cli import main as run  # noqa: PLC0415  # only now is it safe to take time

    run()
