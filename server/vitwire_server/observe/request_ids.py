"""The id that a request goes by in logs, trailers and traces."""

import re
from contextvars import ContextVar
from uuid import uuid4

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""Of the RPC that the current task serves; empty outside of one."""
_SANE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+=@-]{0,63}")


def request_id(offered: str | bytes | None) -> str:
    """The id that the caller offers, if it can stand in a log line, or else a new one."""
    return offered if isinstance(offered, str) and _SANE.fullmatch(offered) else uuid4().hex
