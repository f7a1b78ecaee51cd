"""The hardware queues of a process on a GPU, which ``CUDA_DEVICE_MAX_CONNECTIONS`` sets.

A process with more streams than queues puts several streams into one. A message that waits then blocks the streams
after it in the queue (CUDA C Programming Guide, environment variables: 8 by default, 32 at most). CUDA reads the
variable when it is initialized, so the package sets it when it is imported (``__init__.py``). Part ``queues`` of
``benchmarks/gpu`` counts the streams that wait for another one.
"""

import os
import warnings
from functools import cache

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
_DEFAULT = 8


@cache
def warn_of_few_connections() -> None:
    """Warn once if the process has fewer queues than a pipeline over NCCL has streams: two for each communicator."""
    given = os.environ.get(VARIABLE)
    count = int(given) if given is not None and given.isdecimal() else _DEFAULT
    if count < 2 * _DEFAULT:
        warnings.warn(
            f"{VARIABLE} is {given or 'not set'}, so streams share {count} hardware queues and a message that waits "
            f"may stop compute: set {VARIABLE}=32 before CUDA is initialized",
            stacklevel=3,
        )
