"""Progress bars on stderr while a model loads and its graphs are captured."""

from collections.abc import Iterable
from typing import TypeVar

from rich.console import Console
from rich.progress import track

T = TypeVar("T")


def progress(items: Iterable[T], description: str, total: int) -> Iterable[T]:
    """Yield `items` under a progress bar; shown only on a terminal."""
    console = Console(stderr=True)
    return track(items, description, total, console=console, disable=not console.is_terminal)
