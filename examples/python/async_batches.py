"""Encode a folder of files concurrently; a file that cannot be decoded does not stop the others.

python async_batches.py localhost:50051 photographs/
"""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

from vitwire import AsyncClient, Item, VitwireError


def items(files: list[Path]) -> Iterator[Item]:
    """Files are read as they are sent, so the folder may be larger than memory."""
    for file in files:
        yield Item.from_file(file)


async def encode(target: str, files: list[Path]) -> int:
    """Print a line for each file in order of completion; returns the number of files that failed."""
    failed = 0
    async with (
        AsyncClient(target, priority="batch") as client,  # interactive requests of others go first
        aclosing(client.iter_encode(items(files), return_exceptions=True)) as results,
    ):
        async for index, result in results:
            if isinstance(result, VitwireError):
                failed += 1
                print(f"{files[index].name}: {result}")
            else:
                print(f"{files[index].name}: {result.shape[0]} tokens")
    return failed


def main(target: str, folder: str) -> int:
    """Encode all files of a folder; returns the exit code."""
    files = sorted(file for file in Path(folder).iterdir() if file.is_file())
    return int(asyncio.run(encode(target, files)) > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
