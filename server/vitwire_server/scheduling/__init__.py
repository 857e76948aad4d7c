"""When items run and in which batches. Knows neither torch nor grpc."""
