"""Pictures prepared on a device by Triton kernels: the rules as tables of passes, and the kernel that follows them."""
