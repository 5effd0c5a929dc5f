"""Linear layers over packed weights; see `KernelBackend.pack_linear`."""
