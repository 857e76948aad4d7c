"""A server whose engine breaks on demand: `python tests/support/faulty_server.py FILE serve …`; FILE names the fault.

The one way to break an engine on purpose; part of no package. The file is read at each launch: empty or missing is
no fault, `raise` is a bug, `hang` lasts until the file says something else, `lost` is a sticky error of the device,
`fail` fails the batch, and `slow SECONDS` takes that long.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from vitwire_server import __main__
from vitwire_server.assembling import loading
from vitwire_server.core.budgets import Budget
from vitwire_server.core.items import Item
from vitwire_server.runtime.engine import Engine, Launch

_POLL_SECONDS = 0.02
_fault_file = Path()


class FaultyEngine(Engine):
    """Breaks where a real one would: below the mapping of torch's errors."""

    def _launch(self, items: Sequence[Item], budget: Budget | None) -> Launch:
        match _fault().split():
            case ["raise"]:
                raise ZeroDivisionError("injected")
            case ["lost"]:
                raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered (injected)")
            case ["fail"]:
                raise RuntimeError("injected")
            case ["slow", seconds]:
                time.sleep(float(seconds))
            case ["hang"]:
                while _fault() == "hang":
                    time.sleep(_POLL_SECONDS)
        return super()._launch(items, budget)


def _fault() -> str:
    return _fault_file.read_text().strip() if _fault_file.exists() else ""


if __name__ == "__main__":
    _fault_file = Path(sys.argv[1])
    setattr(loading, "Engine", FaultyEngine)  # noqa: B010 - imported there, not exported
    __main__.main(sys.argv[2:])
