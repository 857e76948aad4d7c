"""This encoder's address in SGLang's language servers that find their encoders themselves, without `--encoder-urls`."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from http.client import HTTPException
from urllib.request import Request, urlopen

logger = logging.getLogger("vitwire.sglang")

_RETRY_SECONDS = 5.0
_TIMEOUT_SECONDS = 5.0


@asynccontextmanager
async def registered(bootstraps: Sequence[str], url: str) -> AsyncGenerator[None, None]:
    """Keep `url` registered with SGLang's bootstrap servers in the block; one that is not up yet is tried again."""
    done: set[str] = set()
    tasks = [asyncio.create_task(_register(bootstrap, url, done)) for bootstrap in bootstraps]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(_unregister(bootstrap, url) for bootstrap in done))


async def _register(bootstrap: str, url: str, done: set[str]) -> None:
    done.add(bootstrap)
    while error := await asyncio.to_thread(_call, "POST", f"{bootstrap}/register_encoder_url", url):
        logger.info("%s does not register this encoder yet: %s", bootstrap, error)
        await asyncio.sleep(_RETRY_SECONDS)
    logger.info("registered as %s with %s", url, bootstrap)


async def _unregister(bootstrap: str, url: str) -> None:
    if error := await asyncio.to_thread(_call, "DELETE", f"{bootstrap}/unregister_encoder_url", url):
        logger.warning("%s did not unregister this encoder: %s", bootstrap, error)


def _call(method: str, address: str, url: str) -> str:
    """What went wrong; empty if nothing did."""
    body = json.dumps({"url": url}).encode()
    request = Request(address, body, {"content-type": "application/json"}, method=method)  # noqa: S310  # checked by the command
    try:
        with urlopen(request, timeout=_TIMEOUT_SECONDS):  # noqa: S310  # as above
            return ""
    except (OSError, HTTPException, ValueError) as error:
        return str(error) or type(error).__name__
