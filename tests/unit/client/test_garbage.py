"""What garbage collections skip."""

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from logging import getLogger

import pytest

from vitwire.shared.garbage import exempt_loaded

LOG = getLogger(__name__)


class Node:
    """Part of a reference cycle."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_collections_skip_what_exists_but_not_what_comes_later() -> None:
    before, lost = Node(), weakref.ref(Node())
    exempt_loaded(LOG)
    assert lost() is None
    assert not any(each is before for each in gc.get_objects())
    later = weakref.ref(Node())
    assert later() is not None
    gc.collect()
    assert later() is None


def test_what_exists_is_still_freed_without_a_cycle() -> None:
    class Plain: ...

    plain = Plain()
    freed = weakref.ref(plain)
    exempt_loaded(LOG)
    del plain
    assert freed() is None


def test_nothing_is_exempt_on_import() -> None:
    code = "import gc, vitwire, vitwire.shared.garbage; print(gc.get_freeze_count())"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "0"
