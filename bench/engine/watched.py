"""Vitwire's EC connector, which notes when each request reached it: for `make engine-bench`.

It runs in vLLM's processes. A line of JSON for each moment, on the system's monotonic clock, goes to the file that
`ENGINE_BENCH_MOMENTS` names.
"""

import json
import os
import time
from typing import Any

import torch

from vitwire.integrations.vllm.connector import VitwireECConnector, _contents
from vitwire.integrations.vllm.table import Content


class Watched(VitwireECConnector):
    """Notes when a request's front end had it (`accepted`), its scheduler saw it, and the worker had its rows."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._seen: set[str] = set()
        self._file = os.open(os.environ["ENGINE_BENCH_MOMENTS"], os.O_WRONLY | os.O_APPEND)
        if self._fetcher:
            rows = self._fetcher._rows

            def noted(content: Content) -> torch.Tensor:
                fetched = rows(content)
                self._note(content=content.content_id, fetched=time.monotonic())
                return fetched

            self._fetcher._rows = noted  # type: ignore[method-assign]

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        """As the connector; notes the first call of each request, which vLLM makes when it could schedule it."""
        if request.request_id not in self._seen:
            self._seen.add(request.request_id)
            now = time.monotonic()
            contents = [each.content_id for each in _contents(request).values()]
            self._note(
                request=request.request_id, queued=now, accepted=now - time.time() + request.arrival_time, of=contents
            )
        return super().ensure_cache_available(request, num_computed_tokens)

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        self._seen.discard(request.request_id)
        return super().request_finished(request)

    def _note(self, **moment: Any) -> None:
        os.write(self._file, json.dumps(moment).encode() + b"\n")  # whole lines, from any thread
