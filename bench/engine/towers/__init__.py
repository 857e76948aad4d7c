"""`make gpu-bench FLAGS=--vllm`: vLLM's tower, in a separate process, and the server's on one device."""
