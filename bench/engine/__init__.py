"""`make engine-bench`: vLLM with a language model, with its tower and with a Vitwire server."""
