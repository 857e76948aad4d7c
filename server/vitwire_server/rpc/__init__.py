"""gRPC: service, codec, health and the table of statuses."""
