"""Vision towers: models, layouts of pixels, processor settings, checkpoints."""
