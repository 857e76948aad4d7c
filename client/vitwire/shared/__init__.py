"""What client and server both use: NIXL agents, regions of memory, the allocator's setting."""
