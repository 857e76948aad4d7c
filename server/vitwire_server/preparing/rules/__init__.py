"""The rules by which the processors of model families choose sizes, tiles and frames. No pixels are needed."""
