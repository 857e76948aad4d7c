"""`vitwire sglang-encoder`: SGLang's encoder protocol, in front of a Vitwire server."""
