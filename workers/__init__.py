"""Models on devices: what a rank's process runs. Depends on torch.

OpenMP threads that wait must sleep, not spin: a server's processes share their cores, and a thread that spins for one
that was put off the CPU costs milliseconds, many times a step. It has to be said before torch loads OpenMP.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
