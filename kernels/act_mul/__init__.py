"""Gated activation: act(gate) * up; see `KernelBackend.act_mul`."""
