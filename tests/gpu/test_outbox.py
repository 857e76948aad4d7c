"""Tests of rows that stay on the device, from tests/unit/server/runtime/memory/test_outbox.py, on the GPU."""

from tests.unit.server.runtime.memory.test_outbox import *  # noqa: F403 - collected here with this folder's device
