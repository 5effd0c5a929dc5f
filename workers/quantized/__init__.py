"""Checkpoints whose weights are integers already: what their config says, how they store them, what becomes of them."""
