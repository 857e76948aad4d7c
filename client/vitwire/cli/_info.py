"""`vitwire info` and `vitwire health`."""

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from vitwire import Model
from vitwire.cli._connection import (
    DEFAULT_TARGET,
    Ca,
    Cert,
    Connection,
    Json,
    Key,
    Target,
    Timeout,
    Tls,
    Token,
    Wait,
)

_SERVING = "SERVING"


def info(
    *,
    target: Target = DEFAULT_TARGET,
    token: Token = None,
    tls: Tls = False,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    timeout: Timeout = 10.0,
    wait: Wait = False,
    as_json: Json = False,
) -> None:
    """Show the service's model, limits and budgets."""
    connection = Connection(target, token, tls, ca, cert, key, timeout, wait)
    with connection.client() as client:
        model = connection.model(client)
    Console().print(_table(model))
    if as_json:
        typer.echo(json.dumps(asdict(model)))


def health(
    service: Annotated[str, typer.Argument(help="Leave empty for readiness, or `liveness`.")] = "",
    *,
    target: Target = DEFAULT_TARGET,
    token: Token = None,
    tls: Tls = False,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    timeout: Timeout = 10.0,
) -> None:
    """Show the health of the service; the exit code is 0 only if it is SERVING."""
    with Connection(target, token, tls, ca, cert, key, timeout).client() as client:
        status = client.health(service)
    typer.echo(status)
    raise typer.Exit(0 if status == _SERVING else 1)


def _table(model: Model) -> Table:
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in asdict(model).items():
        match value:
            case dict():
                text = "\n".join(f"{key} = {each}" for key, each in value.items())
            case tuple():
                text = ", ".join(str(each["tokens"] if isinstance(each, dict) else each) for each in value) or "none"
            case _:
                text = str(value)
        table.add_row(name, text)
    return table
