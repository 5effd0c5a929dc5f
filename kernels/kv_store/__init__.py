"""Writing this step's keys and values into the paged cache; see `KernelBackend.store_kv`."""
