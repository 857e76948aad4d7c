"""Engines with sessions in their process, with sessions that are a link away, and with spare blocks."""

import gc
from collections.abc import AsyncIterator

import pytest

from entered import entered_async
from session_rig import SIZES, Rig, running


@pytest.fixture(scope="module", autouse=True)
def _only_new_garbage() -> None:
    """These tests collect garbage often; what others left in this process would take half a second each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=["local", "remote", "spares"])
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    async with running(Rig(cached=False, nbytes=SIZES[request.param]), request.param) as made:
        yield made


@pytest.fixture(params=["local", "remote", "spares"])
async def caching(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    async with running(Rig(cached=True, nbytes=SIZES[request.param]), request.param) as made:
        yield made


remote = entered_async(lambda: running(Rig(cached=False), "remote"))
