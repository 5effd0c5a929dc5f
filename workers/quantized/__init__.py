"""Checkpoints whose weights are integers or fp8 already: what they say, how they store them, what becomes of them."""
