"""Tests of failures and overlapping batches from tests/unit/server/runtime/test_engine.py, on the GPU."""

from tests.unit.server.runtime.test_engine import (  # noqa: F401 - collected here with this folder's device
    TestCaptureFails,
    TestDeviceLost,
    TestOutOfMemory,
    TestOverlap,
    rig,
    yardstick,
)
