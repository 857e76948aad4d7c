"""Captures in turns from tests/unit/server/runtime/ladders/test_live_capture.py, on the GPU."""

from tests.unit.server.runtime.ladders.test_live_capture import (  # noqa: F401 - collected here with this folder's device
    a_turn_for_each_layer,
    no_collections,
    rig,
    test_a_batch_may_fail_between_the_turns,
    test_a_budget_larger_than_the_static_buffers_is_refused,
    test_a_capture_may_end_in_the_middle,
    test_a_capture_that_fails_in_a_turn_leaves_the_graphs_as_they_were,
    test_a_turn_takes_several_layers_if_they_are_short,
    test_batches_run_on_between_the_turns_of_a_capture,
    test_batches_run_on_between_timed_replays,
    test_layers_that_take_the_device_long_have_turns_of_their_own,
    test_memory_is_flat_over_twenty_changes,
    test_slices_give_the_rows_of_a_whole_graph,
    yardstick,
)
