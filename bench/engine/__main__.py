"""`python -m bench.engine`."""

from bench.engine.command import main

if __name__ == "__main__":  # vLLM's processes import this module again
    main()
