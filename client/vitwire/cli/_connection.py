"""Options that all commands share, the client made from them, and how errors become a line and an exit code."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_type_hints

import typer

from vitwire import Client, DType, Model, Priority, Unauthenticated, VitwireError
from vitwire._transport.attempts import MAX_RETRIES
from vitwire._transport.channel import PORT
from vitwire._transport.connections import CONNECTIONS
from vitwire.shared.named_files import tls_of

Target = Annotated[
    str,
    typer.Option(
        envvar="VITWIRE_TARGET",
        help=f"Address of the service: host:port, dns:///name:port or unix:path; without a port, {PORT}.",
    ),
]
Token = Annotated[str | None, typer.Option(envvar="VITWIRE_TOKEN", help="Bearer token.")]
Tls = Annotated[bool, typer.Option("--tls", help="Use TLS, with the system's root certificates unless --ca is set.")]
Ca = Annotated[Path | None, typer.Option(help="Root certificates, PEM; implies --tls.")]
Cert = Annotated[Path | None, typer.Option(help="Client certificate, PEM, for mutual TLS.")]
Key = Annotated[Path | None, typer.Option(help="Private key of the client certificate, PEM.")]
Timeout = Annotated[float, typer.Option(min=0.001, help="Timeout of each request, in seconds.")]
Wait = Annotated[bool, typer.Option("--wait", help="Wait up to 10 minutes for the server to start and load its model.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document as the last line.")]

DEFAULT_TARGET = f"127.0.0.1:{PORT}"
INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells: 128 + SIGINT."""
_WAIT_SECONDS = 600.0
_NOTICE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Connection:
    """The connection to the service: options of every command, and settings of the commands that have them."""

    target: Target = DEFAULT_TARGET
    token: Token = field(default=None, repr=False)
    tls: Tls = False
    ca: Ca = None
    cert: Cert = None
    key: Key = None
    timeout: Timeout = 10.0
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

    wait: Wait = False


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer reads it: in place of each parameter whose default is a dataclass, its fields.

    Fields that are `Annotated` become options, with the values of that default; the others keep these values.
    """
    groups: dict[str, tuple[Any, list[str]]] = {}
    parameters: list[Parameter] = []
    for each in signature(command).parameters.values():
        if not is_dataclass(each.default):
            parameters.append(each)
            continue
        hints = get_type_hints(type(each.default), include_extras=True)
        names = [own.name for own in fields(each.default) if hasattr(hints[own.name], "__metadata__")]
        groups[each.name] = each.default, names
        for name in names:
            default = getattr(each.default, name)
            parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hints[name]))

    @wraps(command)
    def flat(**values: Any) -> None:  # noqa: ANN401  # one for each parameter
        for group, (default, names) in groups.items():
            values[group] = replace(default, **{name: values.pop(name) for name in names})
        command(**values)

    flat.__signature__ = signature(command).replace(parameters=parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {each.name: each.annotation for each in parameters}
    return flat


@contextmanager
def reported() -> Iterator[None]:
    """Errors in the block end the command with one line on stderr and code 1. Do not print to stdout in it."""
    try:
        yield
    except MemoryError as error:
        fail(f"out of memory: {error}")
    except Unauthenticated as error:
        fail(f"{error}: set --token or VITWIRE_TOKEN")
    except (VitwireError, OSError, ValueError, ImportError) as error:
        fail(str(error) or type(error).__name__)


def warn(message: str) -> None:
    """Print a line on stderr."""
    typer.echo(f"vitwire: {' '.join(message.split())}", err=True)


def fail(message: str) -> NoReturn:
    """Print the message on stderr and exit with code 1."""
    warn(message)
    raise typer.Exit(1)
