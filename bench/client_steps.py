"""The steps of a client's calls, timed from outside: what it does itself, between its caller and gRPC."""

import resource
import time
from collections.abc import Callable
from typing import Any

from vitwire._delivery import answers, assembler
from vitwire._transport import channel as grpc_channel

Row = dict[str, Any]


class ClientSteps:
    """Times the steps of all calls of this process, for good: the client's functions are replaced."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(_STEPS, 0.0)
        self._calls = 0
        self._pages = _pages()
        method = grpc_channel.ENCODE
        write = self._timed("serialise", method.serializer)
        grpc_channel.ENCODE = grpc_channel.Method(method.path, write, self._timed("parse", method.deserializer))
        setattr(assembler._Rows, "add", self._timed("copy", assembler._Rows.add))  # noqa: B010 - a method
        setattr(assembler, "is_finite", self._timed("check", answers.is_finite))  # noqa: B010 - a name it imports

    def taken(self) -> Row:
        """Milliseconds of each step, and fresh pages, of one call: the mean since the last time. Forgets them."""
        calls, pages = max(1, self._calls), _pages()
        self._seconds["copy"] -= self._seconds["check"]  # which is part of it
        steps = {f"{name}_ms": round(1e3 * self._seconds[name] / calls, 2) for name in _STEPS}
        taken = steps | {"fresh_pages": round((pages - self._pages) / calls)}
        self._seconds = dict.fromkeys(_STEPS, 0.0)
        self._calls, self._pages = 0, pages
        return taken

    def _timed(self, name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            try:
                return step(*arguments)
            finally:
                self._seconds[name] += time.perf_counter() - started
                self._calls += name == "serialise"

        return timed


_STEPS = ("serialise", "parse", "copy", "check")


def _pages() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
