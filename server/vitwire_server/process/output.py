"""Output of child processes, forwarded line by line with the child's label."""

import asyncio
import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from typing import BinaryIO

from vitwire_server.observe.logs import message_of

_LINE_BYTES = 1 << 20
"""Longer lines are dropped."""
_NESTED_TEXT = re.compile(rb"\[(rpc-\d+)\] (.*)", re.DOTALL)
_NESTED_JSON = re.compile(rb'\{"process": "(rpc-\d+)", (.*)', re.DOTALL)


def labelled(label: str, line: bytes, *, json_lines: bool) -> bytes:
    """The line with its process: `[cuda:0] …`, or `{"process": "cuda:0", …}`.

    A line that a child of the child wrote has one label for both: `cuda:0/rpc-1`.
    """
    name = label.encode()
    if nested := (_NESTED_JSON if json_lines else _NESTED_TEXT).fullmatch(line):
        name, line = b"%s/%s" % (name, nested[1]), (b"{%s" if json_lines else b"%s") % nested[2]
    if not json_lines:
        return b"[%s] %s" % (name, line)
    if not line.startswith(b'{"'):  # written by a library, not by our logging
        line = json.dumps({"message": line.decode(errors="replace")}).encode()
    return b'{"process": "%s", %s' % (name, line[1:])


class ForwardedPipe:
    """A pipe for the stdout or stderr of one child process."""

    def __init__(self, label: str, out: BinaryIO, on_message: Callable[[str], None], *, json_lines: bool) -> None:
        """Lines go to `out` with the label; `on_message` gets the message of each."""
        self._label = label
        self._out = out
        self._on_message = on_message
        self._json_lines = json_lines
        read_end, self.write_end = os.pipe()
        self._file = os.fdopen(read_end, "rb", buffering=0)

    def child_started(self) -> None:
        """The child process has inherited its end: close it here."""
        os.close(self.write_end)

    async def forward(self) -> None:
        """Forward lines until every process that inherited the write end has closed it."""
        loop = asyncio.get_running_loop()
        lines = asyncio.StreamReader(_LINE_BYTES)
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), self._file)
        try:
            while True:
                with suppress(ValueError):  # longer than the limit: the reader dropped the line
                    if not (line := await lines.readline()):
                        return
                    self._forward(line.rstrip(b"\r\n"))
        finally:
            transport.close()

    def close(self) -> None:
        """Close the read end."""
        self._file.close()

    def _forward(self, line: bytes) -> None:
        self._on_message(message_of(line))
        with suppress(OSError):  # nothing reads our output; keep draining the pipe
            self._out.write(labelled(self._label, line, json_lines=self._json_lines) + b"\n")
            self._out.flush()
