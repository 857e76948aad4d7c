"""Amounts that requests hold together."""

import asyncio
from contextlib import AsyncExitStack, suppress

import pytest

from vitwire.shared.fairness.budgets import Budget, Full, Holding


async def test_one_caller_leaves_a_quarter_to_others() -> None:
    budget = Budget(8)
    async with AsyncExitStack() as stack:
        for _ in range(6):
            (await stack.enter_async_context(budget.holding("a"))).take(1)
        with pytest.raises(Full):
            (await stack.enter_async_context(budget.holding("a"))).take(1)
        for _ in range(2):
            (await stack.enter_async_context(budget.holding("b"))).take(1)
        with pytest.raises(Full):
            (await stack.enter_async_context(budget.holding("c"))).take(1)
        with pytest.raises(Full):
            budget.check("c")
    assert budget.used == 0
    async with budget.holding("a") as alone:
        alone.take(8)


async def stalled(budget: Budget, name: str, amount: int, outcome: list[Holding]) -> None:
    async with budget.holding(name) as holding:
        outcome.append(holding)
        with suppress(TimeoutError):
            async with holding.losable(600, grace=0):
                holding.take(amount)
                await asyncio.Event().wait()


async def test_what_is_due_goes_to_others() -> None:
    """First of the caller that holds the most."""
    budget, holdings = Budget(12), list[Holding]()
    tasks = [asyncio.create_task(stalled(budget, name, 3, holdings)) for name in ("a", "b", "b")]
    await asyncio.sleep(0.01)
    async with budget.holding("c") as taking:
        taking.take(6)
        assert [each.is_lost for each in holdings] == [False, True, False]
        with pytest.raises(Full):
            holdings[1].take(1)
        budget.drain()
        await asyncio.gather(*tasks)
        assert budget.used == 6


async def test_a_body_that_arrives_keeps_its_place() -> None:
    budget = Budget(10)
    async with budget.holding("a") as body, budget.holding("b") as other, body.losable(600, grace=0):
        body.take(7)
        body.advance(1 << 20)
        with pytest.raises(Full):
            other.take(7)
        assert not body.is_lost
