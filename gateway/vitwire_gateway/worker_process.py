"""A process that does jobs for `workers`. What it reads is untrusted."""

import sys
from collections.abc import Callable
from importlib import import_module

from vitwire_children.serving import Answering, serve
from vitwire_gateway.api_errors import ApiError


def _ahead() -> Answering:
    """The module that is named must import whatever jobs use: a confined process cannot."""
    import_module(sys.argv[2])
    return lambda _: (_done, int(sys.argv[3]))


def _done(call: tuple[Callable[..., object], tuple[object, ...]], blob: bytes) -> object:
    """The result of a job of `Workers.run`."""
    job, arguments = call
    return job(blob, *arguments)


if __name__ == "__main__":
    serve(_ahead, ApiError)
