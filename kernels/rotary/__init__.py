"""Rotary position embedding (Su et al., 2021) in half-split pairs, in place; see `KernelBackend.rotary`."""
