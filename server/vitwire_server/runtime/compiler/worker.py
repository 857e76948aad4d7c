"""The compiler: makes the server's tower without its weights, and compiles its forward, one shape after the other."""

import importlib
import os
import socket
import sys
from typing import NoReturn

import torch
from msgspec import json
from torch import nn

from vitwire_server.core.pooling import Pooling
from vitwire_server.runtime.attention.selection import select
from vitwire_server.runtime.compiler.messages import (
    BLUEPRINT,
    REQUEST,
    Blueprint,
    FromCompiler,
    Refused,
    named_tensors,
)
from vitwire_server.towers.checkpoints.checkpoint import open_checkpoint, unfilled_tower
from vitwire_server.towers.tower import Tower

_CPU = torch.device("cpu")
_MOST_REASON = 500
_OUTPUT = "\nOutput:\n"
"""In torch's errors, before what the compiler of C++ wrote."""


def serve(end: int) -> NoReturn:
    """Answer requests on a socket until it is closed."""
    with socket.socket(fileno=end) as link, link.makefile("rwb") as lines:
        blueprint = BLUEPRINT.decode(lines.readline())
        sys.path[:] = blueprint.path
        tower: Tower | None = None
        for line in lines:
            answer: FromCompiler
            try:
                from vitwire_server.runtime.compiler.forwards import compiled  # noqa: PLC0415 - takes seconds to import

                tower = tower or _unfilled(blueprint)
                answer = compiled(tower, REQUEST.decode(line), blueprint.threads)
            except Exception as error:  # noqa: BLE001 - a compiler may fail in any way; the shape stays eager
                answer = Refused(_brief(error))
            lines.write(json.encode(answer) + b"\n")
            lines.flush()
    os._exit(0)


def _unfilled(blueprint: Blueprint) -> Tower:
    """The server's tower, with tensors of the same layouts. Raises ValueError if it has others."""
    module, _, function = blueprint.factory.function.partition(":")
    tower: Tower = getattr(importlib.import_module(module), function)(**blueprint.factory.arguments)
    other = named_tensors(tower).keys() ^ blueprint.tensors.keys()
    if other:
        raise ValueError(f"the tower without weights differs from the server's in {min(other)}")
    for name, layout in blueprint.tensors.items():
        part, _, path = name.partition(".")
        owner, _, last = path.rpartition(".")
        parent = tower.modules[part].get_submodule(owner)
        empty = layout.empty()
        setattr(parent, last, nn.Parameter(empty, requires_grad=False) if last in parent._parameters else empty)  # noqa: SLF001
    return tower


def _brief(error: Exception) -> str:
    """The first line that says something; over C++, of what its compiler said."""
    text = str(error)
    lines = [line.strip() for line in (text.partition(_OUTPUT)[2] or text).splitlines() if line.strip()]
    line = next((line for line in lines if _OUTPUT in text and "error" in line.lower()), lines[0] if lines else "")
    return f"{type(error).__name__}: {line}"[:_MOST_REASON]


def served(model: str, pooling: str, dtype: str, attention: str) -> Tower:
    """A server's tower without its weights: of a checkpoint's folder, with the attention backend called `attention`."""
    tower = unfilled_tower(open_checkpoint(model).pooled(Pooling(pooling)), getattr(torch, dtype))
    attend(tower, attention)
    return tower


def attend(tower: Tower, attention: str) -> None:
    """Use the backend in a tower with segments."""
    if tower.segmented:
        heads, resampler = tower.attention_heads, tower.resampler_heads
        choice = select(attention, _CPU, tower.dtype, *heads, captured=False, resampler=resampler)
        tower.use_attention(choice.implementation)
