"""The compiler as the server sees it: its process, its socket and its folder."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import BinaryIO

from msgspec import DecodeError, json

from vitwire_server.runtime.compiler.messages import FROM_COMPILER, Blueprint, Compile, Compiled, FromCompiler, Refused

_SECRETS = ("VITWIRE_", "OTEL_", "HF_TOKEN", "HUGGING_FACE_")
"""Beginnings of environment variables that a compiler does not need."""
_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_STOP_SECONDS = 10.0
_SHOWN = 200


class NotCompiled(Exception):
    """A forward is not compiled; the message says why."""


class CompilerGone(NotCompiled):
    """The compiler has ended, and with it the compilation."""


class Compiler:
    """Compiles one shape at a time. `close` may be called by any thread, everything else by the one that made it."""

    def __init__(self, blueprint: Blueprint) -> None:
        """Start a process. Raises CompilerGone."""
        self._link, other = socket.socketpair()
        self._lines = self._link.makefile("rwb")
        self._closing = Lock()
        self._closed = False
        self._unsent = json.encode(blueprint) + b"\n"
        """Sent with the first request: the process may read it late, and `close` must not wait for that."""
        with other:
            try:
                self.folder = Path(tempfile.mkdtemp(prefix="vitwire-compiler-")).resolve()
            except OSError as error:
                self._disconnect()
                raise CompilerGone(f"the compiler has no folder to write to: {error}") from error
            try:
                self.process = self._spawn(other)
            except OSError as error:
                self._disconnect()
                shutil.rmtree(self.folder, ignore_errors=True)
                raise CompilerGone(f"the compiler cannot be started: {error}") from error

    def compile(self, request: Compile, seconds: float) -> Compiled:
        """The compiled forward. Raises NotCompiled; CompilerGone if the process ended or took over `seconds`."""
        try:
            self._link.settimeout(seconds)
            unsent, self._unsent = self._unsent, b""
            self._lines.write(unsent + json.encode(request) + b"\n")
            self._lines.flush()
            line = self._lines.readline()
        except TimeoutError:
            self.close()
            raise CompilerGone(f"it takes more than {seconds:g} s") from None
        except (OSError, ValueError):  # the process has ended, or `close` was called
            line = b""
        if not line.endswith(b"\n"):
            raise CompilerGone(self._end())
        try:
            answer: FromCompiler = FROM_COMPILER.decode(line)
        except DecodeError as error:
            self.close()
            raise CompilerGone(f"the compiler sent something else: {error}") from error
        if isinstance(answer, Refused):
            raise NotCompiled(answer.reason)
        return answer

    def close(self) -> None:
        """End the process at once, and remove its files."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            with suppress(OSError):  # wakes the thread that waits for an answer, and the guard, which ends the compiler
                self._link.shutdown(socket.SHUT_RDWR)
            try:
                self.process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self._disconnect()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _end(self) -> str:
        """Why the process has ended."""
        if self._closed:
            return "the server stops"
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_STOP_SECONDS)
        said = _last_line(self.folder / "log")
        self.close()
        return f"the compiler ended unexpectedly ({_death(self.process.returncode)}){said and ': '}{said}"

    def _disconnect(self) -> None:
        with suppress(OSError, ValueError):
            self._lines.close()
        self._link.close()

    def _spawn(self, link: socket.socket) -> "subprocess.Popen[bytes]":
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_SECRETS)}
        kept = environment.get(_CACHE) or str(self.folder / "cache")
        environment |= {_CACHE: kept, "TMPDIR": str(self.folder), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        log: BinaryIO
        with (self.folder / "log").open("wb") as log:
            return subprocess.Popen(  # noqa: S603 - this package
                (sys.executable, "-P", "-m", __package__, str(link.fileno()), str(self.folder)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env=environment,
                pass_fds=[link.fileno()],
                process_group=0,  # Ctrl-C reaches only the server
            )


def _death(code: int) -> str:
    """The signal or exit code that ended the compiler; its guard reports signals as a shell does, as 128 + number."""
    number = -code if code < 0 else code - 128
    return signal.Signals(number).name if number in set(signal.Signals) else f"code {code}"


def _last_line(path: Path) -> str:
    with suppress(OSError):
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line.strip()[:_SHOWN] for line in reversed(lines) if line.strip()), "")
    return ""
