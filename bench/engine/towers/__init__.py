"""`make engine-bench FLAGS=--towers`: vLLM's tower and the server's on one device, each in its own process."""
