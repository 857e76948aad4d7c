"""Captures between batches from tests/unit/server/runtime/ladders/test_live_capture.py, on the GPU."""

from tests.unit.server.runtime.ladders.test_live_capture import (  # noqa: F401 - collected here with this folder's device
    rig,
    test_a_budget_larger_than_the_static_buffers_is_refused,
    test_a_failed_capture_leaves_the_graphs_as_they_were,
    test_batches_run_on_between_the_parts_of_a_capture,
    test_memory_is_flat_over_twenty_changes,
    yardstick,
)
