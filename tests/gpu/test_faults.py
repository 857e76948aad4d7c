"""What tests/unit/test_engine.py says of failures and of overlapping batches, on the GPU."""

from unit.test_engine import (  # noqa: F401 - collected here with this folder's device
    TestCaptureFails,
    TestDeviceLost,
    TestOutOfMemory,
    TestOverlap,
    rig,
    yardstick,
)
