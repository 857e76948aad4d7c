"""What the package shows, and what it does not do behind its users' backs."""

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints, is_typeddict

import pytest

import vitwire
from vitwire import AsyncClient, Client
from vitwire._requests import ClientOptions
from vitwire.shared import allocator

SURFACE = [
    "Accepted",
    "AsyncClient",
    "Budget",
    "Client",
    "DType",
    "DeadlineExceeded",
    "Embedding",
    "EncodeFailed",
    "InvalidItem",
    "Item",
    "Limits",
    "Modality",
    "Model",
    "NotCached",
    "Overloaded",
    "Priority",
    "ProcessorOptions",
    "Report",
    "Result",
    "RowGroup",
    "Stored",
    "TileShapes",
    "Unauthenticated",
    "Unavailable",
    "Violation",
    "VitwireError",
]


OF_CALLS = ("timeout", "output_type", "priority")
"""Arguments that every method which encodes has, with None for the client's own."""
OF_CONTENT = {
    "encode_images": {"content_ids"},
    "encode_clips": {"content_ids", "keep_ratio"},
    "encode_batch": {"content_ids", "keep_ratio", "crops", "modality"},
}
"""Those of methods that make items; elsewhere, items have them. Images are not pruned."""


def expanded(function: Any) -> inspect.Signature:
    """The signature, with each option in place of `**options: Unpack[...]`."""
    known = inspect.signature(function)
    found = []
    for each in known.parameters.values():
        if each.kind is not inspect.Parameter.VAR_KEYWORD:
            found.append(each)
            continue
        (options,) = get_args(each.annotation)
        assert is_typeddict(options), function
        found += [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in get_type_hints(options)
        ]
    return known.replace(parameters=found)


def methods(kind: type) -> dict[str, inspect.Signature]:
    return {name: expanded(each) for name, each in inspect.getmembers(kind, callable) if name[0] != "_"}


def test_both_clients_have_the_same_methods_and_arguments() -> None:
    own, other = methods(Client), methods(AsyncClient)
    assert own.keys() == other.keys()
    assert inspect.signature(Client) == inspect.signature(AsyncClient)
    for name, signature in own.items():
        theirs = other[name].parameters
        assert list(signature.parameters) == list(theirs), name
        for field, each in signature.parameters.items():
            assert (each.kind, each.default) == (theirs[field].kind, theirs[field].default), (name, field)


def test_methods_that_encode_have_the_same_arguments() -> None:
    for name, signature in methods(Client).items():
        if "encode" in name or "store" in name:
            assert {field: signature.parameters[field].default for field in OF_CALLS} == dict.fromkeys(OF_CALLS), name
            assert OF_CONTENT.get(name, set()) <= signature.parameters.keys(), name


def test_arguments_of_a_client_are_its_options() -> None:
    assert inspect.signature(Client) == inspect.signature(ClientOptions)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_unknown_arguments_are_refused(kind: Any) -> None:
    with pytest.raises(TypeError, match="timout"):
        kind("localhost:1", timout=5)
    client = kind("localhost:1")
    with pytest.raises(TypeError, match="timout"):
        client.with_options(timout=5)
    with pytest.raises(TypeError, match="store_only"):
        client._call({"store_only": True})


def test_an_unknown_argument_of_a_call_is_refused() -> None:
    with Client("localhost:1") as client, pytest.raises(TypeError, match="timout"):
        client.encode([], timout=5)


def test_options_of_a_derived_client_are_arguments_of_the_first() -> None:
    derived = expanded(Client.with_options).parameters.keys() - {"self"}
    assert derived < inspect.signature(Client).parameters.keys()
    assert set(OF_CALLS) <= derived


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_surface_is_what_it_is_promised_to_be() -> None:
    assert vitwire.__all__ == SURFACE
    shown = {name for name in vars(vitwire) if name[0] != "_" and name[0].isupper()}
    assert shown - {"PackageNotFoundError"} == set(SURFACE)
    assert vitwire.__version__


def test_every_error_is_a_vitwire_error() -> None:
    errors = [
        each for each in map(vars(vitwire).get, SURFACE) if isinstance(each, type) and issubclass(each, Exception)
    ]
    assert len(errors) == 8
    assert all(issubclass(each, vitwire.VitwireError) for each in errors)


def test_importing_it_is_light() -> None:
    heavy = "torch transformers PIL typer rich safetensors vitwire_server"
    code = f"import sys, vitwire; print([name for name in '{heavy}'.split() if name in sys.modules])"
    assert run(code) == "[]"


def test_the_package_is_typed() -> None:
    assert (Path(vitwire.__file__).parent / "py.typed").exists()


def test_the_allocator_is_tuned_in_the_process_that_asks() -> None:
    if "glibc" not in run("import platform; print(platform.libc_ver()[0])"):
        pytest.skip("tuning is for glibc")
    code = "import ctypes; from vitwire.shared import allocator as a; x = a.tune(); a.trim(); print(x)"
    assert run(code) == "True"


def test_another_libc_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda _: object())
    assert not allocator.tune()
    assert not allocator.trim()
