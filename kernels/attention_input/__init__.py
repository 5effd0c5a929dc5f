"""Norm and rotation of queries and keys, store of keys and values, in one; see `KernelBackend.attention_input`."""
