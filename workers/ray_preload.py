"""Imported by Ray in a worker before it knows what that will be (`RAY_preload_python_modules`), else by a rank's host.

A process that imports everything takes longer to start than all of Ray: so it is started at once.
"""

from novainfer.transport.zygote import ZygoteProcess

ZYGOTE = ZygoteProcess("workers.rank_zygote")
