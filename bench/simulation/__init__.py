"""A fleet of encoders, simulated: docs/scale.md."""
