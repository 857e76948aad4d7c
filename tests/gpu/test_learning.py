"""Captures between batches from tests/unit/server/runtime/ladders/test_live_capture.py, on the GPU."""

from tests.unit.server.runtime.ladders.test_live_capture import (  # noqa: F401 - collected here with this folder's device
    rig,
    test_a_budget_larger_than_the_static_buffers_is_refused,
    test_a_capture_pauses_while_a_batch_is_launched,
    test_a_capture_that_needs_an_eager_forward_gets_one,
    test_a_failed_capture_leaves_the_graphs_as_they_were,
    test_batches_do_not_wait_for_a_capture,
    test_batches_run_on_between_the_parts_of_a_capture,
    test_memory_is_flat_over_twenty_changes,
    test_memory_is_freed_after_a_capture,
    yardstick,
)
