"""Run in place of a decoder: its program, unchanged, with a picture library that tries acts when it gets `ACT`.

On a device: when it gets a picture or a clip that is WIDE pixels wide.
"""

import runpy
import sys
from typing import Any

import acts
from vitwire_children.serving import Fault, NotDone
from vitwire_server.preparing.files import images

ACT, WIDE = b"ACT", 1234


def _measure(data: bytes, *others: Any) -> Any:
    if data == ACT:
        raise NotDone(Fault.MALFORMED, acts.results())
    return _original(data, *others)


def _act_on_device() -> None:
    from vitwire_server.preparing.device import resizing  # noqa: PLC0415 - loads torch

    original = resizing.prepared

    def prepared(picture: Any, *others: Any) -> Any:
        if WIDE in picture.shape:
            raise NotDone(Fault.LOST, acts.results())
        return original(picture, *others)

    setattr(resizing, "prepared", prepared)  # noqa: B010


def run(module: str) -> None:
    """Run a decoder's module, of `preparing`."""
    setattr(images, "measure", _measure)  # noqa: B010
    if sys.argv[3]:
        _act_on_device()
    runpy.run_module(f"vitwire_server.preparing.{module}", run_name="__main__", alter_sys=True)


_original = images.measure
if __name__ == "__main__":
    run("device.hardware" if sys.argv[3] else "files.worker")
