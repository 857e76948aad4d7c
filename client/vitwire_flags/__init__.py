"""Settings of commands: flags and variables from the fields of a dataclass, and the files that they name.

Apart from the client, whose import would load gRPC and numpy before a server has read its settings.
"""
