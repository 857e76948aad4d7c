"""Demo models, which are tiny and random, for the `demo-checkpoint` command and tests."""
