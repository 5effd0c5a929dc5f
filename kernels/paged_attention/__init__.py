"""Causal attention of packed query rows over a paged key/value cache; see `KernelBackend.paged_attention`."""
