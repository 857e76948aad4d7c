"""What the engine does for each RPC: admission, cache, queue. The seam between RPCs and the engine."""
