"""What the processes of a server do for the first time: modules that they import, processes that they start.

A copy of this file named `sitecustomize.py`, in a folder of PYTHONPATH, reports to the socket in that folder: decoders
may not write files, but may send. It reports each process, and what it does once the file beside the socket says so.
"""

import mmap
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread

_SOCKET, _WATCHED = "events", "watched"
_BYTES = 4096
_STARTED = "started"


@dataclass
class Noted:
    """The processes that were started, and what they did from `watch` on."""

    folder: Path
    messages: list[str] = field(default_factory=list)

    @property
    def processes(self) -> int:
        return len(self.messages) - len(self.events)

    @property
    def events(self) -> list[str]:
        return [message for message in self.messages if message.split()[1] != _STARTED]

    def watch(self) -> None:
        with (self.folder / _WATCHED).open("r+b") as file:
            file.write(b"\1")


@contextmanager
def noted(folder: Path, environment: dict[str, str]) -> Iterator[Noted]:
    """What is noted of all Python programs that are started with this environment, which this changes."""
    shutil.copy(__file__, folder / "sitecustomize.py")
    (folder / _WATCHED).write_bytes(b"\0")
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, sys.path)])
    found = Noted(folder)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiving:
        receiving.bind(str(folder / _SOCKET))

        def read() -> None:
            while message := receiving.recv(_BYTES):
                found.messages.append(message.decode())

        reading = Thread(target=read)
        reading.start()
        try:
            yield found
        finally:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ending:
                ending.sendto(b"", str(folder / _SOCKET))
            reading.join()


def _notify() -> None:
    """Send what this process does while it is watched; each message waits until those before it were read."""
    folder = Path(__file__).parent
    sending = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sending.connect(str(folder / _SOCKET))
    with (folder / _WATCHED).open("rb") as file:
        watched = mmap.mmap(file.fileno(), 1, prot=mmap.PROT_READ)
    sending.send(f"{os.getpid()} {_STARTED}".encode())

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if watched[0] and event in ("import", "subprocess.Popen", "os.fork"):
            what = arguments[1] if event == "subprocess.Popen" else arguments[0] if arguments else ""
            sending.send(f"{os.getpid()} {event} {what}".encode()[:_BYTES])

    sys.addaudithook(hook)


if __name__ == "sitecustomize":
    _notify()
