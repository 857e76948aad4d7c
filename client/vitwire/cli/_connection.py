"""Options that all commands share, the client made from them, and how errors become a line and an exit code."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, NoReturn

import grpc
import typer

from vitwire import AsyncClient, Client, DType, Model, Priority, VitwireError
from vitwire._transport.connections import CONNECTIONS
from vitwire._transport.retry import MAX_RETRIES

Target = Annotated[
    str,
    typer.Option(envvar="VITWIRE_TARGET", help="Address of the service: host:port, dns:///name:port or unix:path."),
]
Token = Annotated[str | None, typer.Option(envvar="VITWIRE_TOKEN", help="Bearer token.")]
Tls = Annotated[bool, typer.Option("--tls", help="Use TLS, with the system's root certificates unless --ca is set.")]
Ca = Annotated[Path | None, typer.Option(help="Root certificates, PEM; implies --tls.")]
Cert = Annotated[Path | None, typer.Option(help="Client certificate, PEM, for mutual TLS.")]
Key = Annotated[Path | None, typer.Option(help="Private key of the client certificate, PEM.")]
Timeout = Annotated[float, typer.Option(min=0.001, help="Timeout of each request, in seconds.")]
Wait = Annotated[bool, typer.Option("--wait", help="Wait up to 10 minutes for the server to start and load its model.")]
OutputType = Annotated[
    DType | None, typer.Option(help="Type of the embeddings on the network; default: the server's dtype.")
]
RequestPriority = Annotated[Priority, typer.Option("--priority", help="batch: wait behind interactive requests.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document as the last line.")]

DEFAULT_TARGET = "127.0.0.1:50051"
INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells: 128 + SIGINT."""
_WAIT_SECONDS = 600.0
_NOTICE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Connection:
    """How to reach the service."""

    target: str
    token: str | None = field(repr=False)
    tls: bool
    ca: Path | None
    cert: Path | None
    key: Path | None
    timeout: float
    wait: bool = False
    max_retries: int = MAX_RETRIES
    connections: int = CONNECTIONS
    output_type: DType | None = None
    priority: Priority = "interactive"

    @contextmanager
    def client(self) -> Iterator[Client]:
        """A client; errors in the block are reported as by `reported`."""
        with (
            reported(),
            Client(
                self.target,
                tls=self._tls(),
                token=self.token,
                timeout=self.timeout,
                wait_for_ready=self.wait,
                max_retries=self.max_retries,
                connections=self.connections,
                output_type=self.output_type,
                priority=self.priority,
            ) as client,
        ):
            yield client

    def async_client(self) -> AsyncClient:
        """A client for asyncio, to be made in the event loop that uses it. Raises ValueError or OSError."""
        return AsyncClient(
            self.target,
            tls=self._tls(),
            token=self.token,
            timeout=self.timeout,
            wait_for_ready=self.wait,
            max_retries=self.max_retries,
            connections=self.connections,
        )

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

    def _tls(self) -> bool | Path | grpc.ChannelCredentials:
        if (self.cert is None) != (self.key is None):
            raise ValueError("--cert and --key must be set together")
        if self.cert is None:
            return self.ca or self.tls
        ca, key, cert = (path.read_bytes() if path else None for path in (self.ca, self.key, self.cert))
        return grpc.ssl_channel_credentials(ca, key, cert)


@contextmanager
def reported() -> Iterator[None]:
    """Errors in the block end the command with one line on stderr and code 1. Do not print to stdout in it."""
    try:
        yield
    except MemoryError as error:
        fail(f"out of memory: {error}")
    except (VitwireError, OSError, ValueError, ImportError) as error:
        fail(str(error) or type(error).__name__)


def warn(message: str) -> None:
    """Print a line on stderr."""
    typer.echo(f"vitwire: {' '.join(message.split())}", err=True)


def fail(message: str) -> NoReturn:
    """Print the message on stderr and exit with code 1."""
    warn(message)
    raise typer.Exit(1)
