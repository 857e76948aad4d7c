"""`vitwire info` and `vitwire health`."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

import typer

from vitwire import Budget, Model
from vitwire_cli.connection import Connection, Json, PatientConnection
from vitwire_flags.options import with_options

_CONNECTION, _PATIENT = Connection(), PatientConnection()
_SECTIONS = {
    "model": ("model_id", "model_type", "weights_fingerprint", "dtype", "pooling", "available_poolings"),
    "embeddings": ("embedding_width", "deepstack_levels", "matryoshka", "rows_by_grid", "clip_groups", "deliveries"),
    "pixels": ("patch_size", "merge_size", "temporal_patch_size", "channels"),
    "preparation": ("prepared", "encodings", "options", "preparation_fingerprint"),
    "places": ("preparation", "decoding", "clip_decoding"),
    "server": ("server_version", "device", "device_sharing", "attention_backend", "unavailable"),
    "graphs": ("graphs", "budgets", "dropped_budgets"),
}


@with_options
def info(*, connection: PatientConnection = _PATIENT, as_json: Json = False) -> None:
    """Show the service's model, what it prepares where, its device, budgets and limits."""
    with connection.client() as client:
        model = connection.model(client)
    typer.echo("\n".join(_lines(model)))
    if as_json:
        typer.echo(json.dumps(asdict(model)))


@with_options
def health(
    service: Annotated[str, typer.Argument(help="Leave empty for readiness, or `liveness`.")] = "",
    *,
    connection: Connection = _CONNECTION,
) -> None:
    """Show the health of the service; the exit code is 0 only if it is SERVING."""
    with connection.client() as client:
        status = client.health(service)
    typer.echo(status)
    raise typer.Exit(0 if status == "SERVING" else 1)


def _lines(model: Model) -> Iterator[str]:
    """Sections of names and values. Values are never cut or wrapped, so that they can be copied."""
    for title, entries in _sections(model).items():
        shown = {name.replace("_", " "): text for name, value in entries.items() if (text := _text(value))}
        if shown:
            width = max(map(len, shown))
            yield title
            yield from (f"  {name:{width}}  {text}" for name, text in shown.items())


def _sections(model: Model) -> dict[str, dict[str, object]]:
    limits = {name: value or None for name, value in asdict(model.limits).items()}
    named = {title: {name: getattr(model, name) for name in names} for title, names in _SECTIONS.items()}
    tiles = {name: value or None for name, value in asdict(model.tiles).items()} if model.tiles else {}
    return named | {"tiles": tiles, "limits": limits}


def _text(value: object) -> str:
    match value:
        case None | () | "":
            return ""
        case (int(), int()):
            return "x".join(map(str, value))
        case tuple():
            return ", ".join(str(each.tokens) if isinstance(each, Budget) else _text(each) for each in value)
        case _:
            return str(value)
