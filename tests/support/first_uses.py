"""What the processes of a server do for the first time: modules that they import, processes that they start.

A copy of this file named `sitecustomize.py`, in a folder of PYTHONPATH, reports to the socket in that folder: decoders
may not write files, but may send.
"""

import os
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

_SOCKET = "events"
_BYTES = 4096


@contextmanager
def noted(folder: Path, environment: dict[str, str]) -> Iterator[list[str]]:
    """The events of all Python programs that are started with this environment, which this changes."""
    shutil.copy(__file__, folder / "sitecustomize.py")
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, sys.path)])
    events: list[str] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiving:
        receiving.bind(str(folder / _SOCKET))

        def read() -> None:
            while message := receiving.recv(_BYTES):
                events.append(message.decode())

        reading = Thread(target=read)
        reading.start()
        try:
            yield events
        finally:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ending:
                ending.sendto(b"", str(folder / _SOCKET))
            reading.join()


def _notify() -> None:
    """Send what this process does from now on; each message waits until those before it were read."""
    sending = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sending.connect(str(Path(__file__).with_name(_SOCKET)))

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in ("import", "subprocess.Popen", "os.fork"):
            what = arguments[1] if event == "subprocess.Popen" else arguments[0] if arguments else ""
            sending.send(f"{os.getpid()} {event} {what}".encode()[:_BYTES])

    sys.addaudithook(hook)


if __name__ == "sitecustomize":
    _notify()
