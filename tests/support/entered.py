"""Fixtures that only enter a context: what it gives is the fixture, and it ends when the fixture does."""

import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Literal

import pytest

Scope = Literal["function", "module", "session"]


def entered(
    context: Callable[..., AbstractContextManager[Any]], scope: Scope = "module", params: Sequence[Any] | None = None
) -> Any:
    """The fixture of a context manager that is made of other fixtures: those that the callable names."""

    def fixture(**needed: Any) -> Iterator[Any]:
        with context(**needed) as given:
            yield given

    return _needing(context, fixture, scope, params)


def entered_async(context: Callable[..., AbstractAsyncContextManager[Any]]) -> Any:
    """The same of an asynchronous one, for each test."""

    async def fixture(**needed: Any) -> AsyncIterator[Any]:
        async with context(**needed) as given:
            yield given

    return _needing(context, fixture, "function", None)


def _needing(context: Callable[..., Any], fixture: Any, scope: Scope, params: Sequence[Any] | None) -> Any:
    fixture.__signature__ = inspect.signature(context)  # by which pytest knows what to pass
    return pytest.fixture(scope=scope, params=params)(fixture)
