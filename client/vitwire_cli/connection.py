"""Options that all commands share, the client made from them, and how errors become a line and an exit code."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from vitwire import Client, DType, Model, Priority, Unauthenticated, VitwireError
from vitwire._transport.attempts import MAX_RETRIES
from vitwire._transport.channel import PORT
from vitwire._transport.connections import CONNECTIONS
from vitwire.shared.named_files import tls_of
from vitwire_flags.options import flag
from vitwire_flags.variables import with_variables

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document as the last line.")]

INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells: 128 + SIGINT."""
_WAIT_SECONDS = 600.0
_NOTICE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Connection:
    """The connection to the service: options of every command, and settings of the commands that have them."""

    target: str = flag(
        f"127.0.0.1:{PORT}",
        f"Address of the service: host:port, dns:///name:port or unix:path; without a port, {PORT}.",
        envvar="VITWIRE_TARGET",
    )
    token: str | None = flag(None, "Bearer token.", envvar="VITWIRE_TOKEN", hide_input=True)
    tls: bool = flag(False, "Use TLS, with the system's root certificates unless --ca is set.", param_decls=["--tls"])
    ca: Path | None = flag(None, "Root certificates, PEM; implies --tls.")
    cert: Path | None = flag(None, "Client certificate, PEM, for mutual TLS.")
    key: Path | None = flag(None, "Private key of the client certificate, PEM.")
    timeout: float = flag(10.0, "Timeout of each request, in seconds.", 0.001)
    wait: bool = False
    max_retries: int = MAX_RETRIES
    connections: int = CONNECTIONS
    output_type: DType | None = None
    priority: Priority = "interactive"

    @contextmanager
    def client(self) -> Iterator[Client]:
        """A client; errors in the block are reported as by `reported`."""
        names = ("target", "token", "timeout", "max_retries", "connections", "output_type", "priority")
        arguments = {name: getattr(self, name) for name in names}
        with reported():
            tls = tls_of(tls=self.tls, ca=self.ca, cert=self.cert, key=self.key)
            with Client(**arguments, tls=tls, wait_for_ready=self.wait) as client:
                yield client

    def model(self, client: Client) -> Model:
        """The service's model; with `wait`, once a server is ready, with a notice on stderr if that takes time."""
        if not self.wait:
            return client.model()
        line = f"waiting up to {_WAIT_SECONDS:.0f} s for the server at {self.target} to be ready"
        notice = threading.Timer(_NOTICE_SECONDS, warn, [line])
        notice.daemon = True
        notice.start()
        try:
            return client.model(max(self.timeout, _WAIT_SECONDS))
        finally:
            notice.cancel()


@dataclass(frozen=True, slots=True)
class PatientConnection(Connection):
    """With the option to wait for the server."""

    wait: bool = flag(
        False, "Wait up to 10 minutes for the server to start and load its model.", param_decls=["--wait"]
    )


@contextmanager
def reported(variables_prefix: str = "") -> Iterator[None]:
    """Errors in the block end the command with one line on stderr and code 1. Do not print to stdout in it."""
    try:
        yield
    except MemoryError as error:
        fail(f"out of memory: {error}")
    except Unauthenticated as error:
        fail(f"{error}: set --token or VITWIRE_TOKEN")
    except ModuleNotFoundError:  # `vitwire_cli.main` says how to install it
        raise
    except (VitwireError, OSError, ValueError, ImportError) as error:
        fail(with_variables(str(error), variables_prefix) or type(error).__name__)


def warn(message: str) -> None:
    """Print a line on stderr."""
    typer.echo(f"vitwire: {' '.join(message.split())}", err=True)


def fail(message: str) -> NoReturn:
    """Print the message on stderr and exit with code 1."""
    warn(message)
    raise typer.Exit(1)
