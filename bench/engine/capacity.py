"""The highest rates of encoder and engine alone, and the rates of several of each, computed from these."""

import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from math import prod

import numpy as np
from bench.engine.answers import Answer, Row, rate
from bench.engine.loads import Load, drive
from bench.engine.requests import Asked

from vitwire import AsyncClient, Item, VitwireError

NOTE = (
    "computed, not measured: N engines and k encoders answer min(N x engine without images, k x encoder alone) "
    "requests per second; all_local is N + k times one engine with its own tower; fetching rows is taken as free"
)
_MOST = 8
"""Devices of the largest machine that is computed."""


async def encoder_alone(
    client: AsyncClient, asked: Sequence[Asked], load: Load, names: Iterator[str], turns: int = 2
) -> Row:
    """Rates of a server that stores each request's images, in `turns` turns, and returns no rows."""
    model = await client.model()

    async def call(number: int) -> Answer:
        return await _stored(client, ready[number])

    ready = [[_new(item, f"{next(names)}-{turn}") for item in each.items] for turn in range(turns) for each in asked]
    answers = await drive(load, len(ready), call)
    good = [answer for answer in answers if not answer.error]
    row: Row = {"requests": len(answers), "errors": len(answers) - len(good)}
    if good:
        rows = sum(prod(item.grid) for item in asked[0].items) // model.merge_size**2
        row["requests_per_s"] = round(rate(good, load), 2)
        row["rows_per_s"] = round(rows * rate(good, load))
    return row


def _new(item: Item, name: str) -> Item:
    """An item that no cache knows: its first values are those of its name."""
    assert item.pixels is not None, "drawn as patches"
    pixels = np.array(item.pixels)
    name_bytes = np.frombuffer(name.encode(), np.uint8)
    pixels.reshape(-1)[: len(name_bytes)] = name_bytes
    return replace(item, pixels=pixels, content_id=name)


async def _stored(client: AsyncClient, items: Sequence[Item]) -> Answer:
    answer = Answer(start=time.monotonic())
    try:
        async with aclosing(client.iter_store(items)) as results:
            async for _, result in results:
                if isinstance(result, VitwireError):
                    raise result
    except VitwireError as error:
        answer.error = repr(error)
    answer.end = time.monotonic()
    return answer


def together(local: float, engine: float, encoder: float) -> list[Row]:
    """What engines and encoders answer per second, for each number of devices with the best ratio to all local.

    local: one engine with its own tower; engine: one without images; encoder: one alone; all in requests per second.
    """
    rows = []
    for devices in range(2, _MOST + 1):
        splits = [(min(n * engine, (devices - n) * encoder), n) for n in range(1, devices)]
        answered, engines = max(splits)
        rows.append(
            {
                "engines": engines,
                "encoders": devices - engines,
                "requests_per_s": round(answered, 2),
                "all_local": round(devices * local, 2),
                "ratio": round(answered / (devices * local), 3),
            }
        )
    return rows
