"""RMSNorm (Zhang and Sennrich, 2019), alone or after a residual add; see `KernelBackend.rms_norm`."""
