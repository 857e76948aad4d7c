"""The gRPC edge: service, codec, health and the table of statuses."""
