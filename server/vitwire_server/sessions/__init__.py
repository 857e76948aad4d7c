"""Sessions, the seam between RPCs and the engine: admission, cache and queue for each RPC."""
