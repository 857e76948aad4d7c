"""Shared by client and server: NIXL agents, regions of memory, the allocator's setting."""
