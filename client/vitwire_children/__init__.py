"""Child processes of server and gateway. Apart from the client, whose import would load gRPC into each of them."""
