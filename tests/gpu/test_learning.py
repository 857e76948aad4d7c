"""Captures from tests/unit/server/runtime/ladders/test_live_capture.py, on the GPU."""

from tests.unit.server.runtime.ladders.test_live_capture import (  # noqa: F401 - collected here with this folder's device
    no_collections,
    rig,
    test_a_budget_larger_than_the_static_buffers_is_refused,
    test_a_capture_that_fails_leaves_the_graphs_as_they_were,
    test_batches_in_flight_share_the_static_buffers_with_a_capture,
    test_memory_is_flat_over_twenty_changes,
    test_replays_are_timed_on_a_device,
    yardstick,
)
