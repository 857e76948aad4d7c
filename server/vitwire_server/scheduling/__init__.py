"""Decides when items run and in which batches. Imports neither torch nor grpc."""
