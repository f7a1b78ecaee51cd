"""How this process was started: by ``torchrun``, by hand as a rank, or as a child of a rank."""

import multiprocessing
import os

_BEGUN = "PANPIPE_RANK_PROCESS"
"""Set to its own number by a rank that was started by hand: its children inherit RANK, but are not ranks."""


def uses_agent_store() -> bool:
    """Whether ``torchrun`` hosts the job's store; otherwise rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def begin_by_hand() -> bool:
    """Whether this process is a rank that was started by hand; its children will not be taken for ranks."""
    given = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")]
    wanted = all(each.isdecimal() for each in given) and given[1] != "1" and bool(os.environ.get("MASTER_ADDR"))
    child = multiprocessing.parent_process() is not None or os.environ.get(_BEGUN, str(os.getpid())) != str(os.getpid())
    if not wanted or child or uses_agent_store():
        return False
    os.environ[_BEGUN] = str(os.getpid())
    return True
