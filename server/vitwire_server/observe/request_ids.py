"""Request ids, as in logs, trailers and traces."""

import re
from contextvars import ContextVar
from uuid import uuid4

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the current task's RPC; empty outside of RPCs."""
_VALID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+=@-]{0,63}")


def request_id(offered: str | bytes | None) -> str:
    """The caller's id if it is safe to log, else a new one."""
    return offered if isinstance(offered, str) and _VALID.fullmatch(offered) else uuid4().hex
