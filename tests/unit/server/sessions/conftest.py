"""Engines with sessions in their process, with sessions that are a link away, and with spare blocks."""

import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from session_rig import SIZES, Rig


@pytest.fixture(scope="module", autouse=True)
def _only_new_garbage() -> None:
    """These tests collect garbage often; what others left in this process would take half a second each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=["local", "remote", "spares"])
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    async with _running(Rig(cached=False, nbytes=SIZES[request.param]), request.param) as made:
        yield made


@pytest.fixture(params=["local", "remote", "spares"])
async def caching(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    async with _running(Rig(cached=True, nbytes=SIZES[request.param]), request.param) as made:
        yield made


@pytest.fixture
async def remote() -> AsyncIterator[Rig]:
    async with _running(Rig(cached=False), "remote") as made:
        yield made


@asynccontextmanager
async def _running(made: Rig, shape: str) -> AsyncIterator[Rig]:
    """The rig, with sessions of this shape; everything is given back at the end."""
    try:
        yield made if shape == "local" else await made.over_a_link(spares=shape == "spares")
        await made.settle_memory()
    finally:
        await made.close()
