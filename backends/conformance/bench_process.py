"""A process that runs the rules: with one device, or with all of them as threads."""

import multiprocessing
import os
import threading
from collections.abc import Sequence
from itertools import permutations
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from attrs import frozen
from torch._C._distributed_c10d import TCPStore

from ..contract import Backend
from ..kind import BackendKind
from .bench import Bench
from .payload import DTYPES, BrokenRuleError
from .rules import RULES, rules_of

HOST = "127.0.0.1"


@frozen
class Job:
    """The job of the processes.

    Args:
        ranks: whether each device has a separate process.
        first: number of the first rule to run.
        port: of the store on this machine through which the processes connect.
    """

    kind: BackendKind
    ranks: bool
    devices: int
    where: str
    first: int
    port: int


def serve(job: Job, local: Sequence[int], line: Connection) -> None:
    """Run the rules on this process's devices, and send (device, number of the rule, problem) for each.

    The number ``first - 1`` reports that the device is connected.

    Args:
        line: the pipe to the process that started this one.
    """
    torch.set_num_threads(1)
    ends = _connect(job, local, line)
    speaking, broken = threading.Lock(), threading.Event()

    def walk(end: Backend) -> None:
        try:
            end.connect(permutations(range(end.devices), 2))
        except BaseException as error:
            line.send((end.device, job.first, f"connect failed with {type(error).__name__}: {error}"))
            broken.set()
            return
        dtypes = [dtype for dtype in DTYPES if job.kind.dtypes is None or dtype in job.kind.dtypes]
        bench = Bench(end, dtypes=dtypes, where=_place(job, end.device), alone=job.ranks)
        with speaking:
            line.send((end.device, job.first - 1, None))
        for number in range(job.first, len(rules_of(job.kind))):
            problem = _problem(number, bench)
            with speaking:
                line.send((end.device, number, problem))
            if problem is not None:
                broken.set()
                return

    threads = [threading.Thread(target=walk, args=(end,)) for end in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    parent = multiprocessing.parent_process()
    if broken.is_set() and parent is not None:
        parent.join()  # it kills this process; an earlier exit would look like a second problem to the other devices
    line.close()
    os._exit(0)  # without waiting for threads that the backend left running


def _problem(number: int, bench: Bench) -> str | None:
    try:
        RULES[number].run(bench)
    except BrokenRuleError as error:
        return str(error)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return None


def _connect(job: Job, local: Sequence[int], line: Connection) -> Sequence[Backend]:
    try:
        if job.ranks:
            assert job.kind.ranks is not None
            if job.where == "cuda":
                torch.cuda.set_device(_place(job, local[0]))  # a rank's end of the transport uses the current device
            store = TCPStore(HOST, job.port, is_master=False)
            dist.init_process_group("gloo", store=store, rank=local[0], world_size=job.devices)
            return [job.kind.ranks(dist.group.WORLD)]
        assert job.kind.threads is not None
        return job.kind.threads(job.devices)
    except BaseException as error:
        for device in local:
            line.send((device, job.first, f"connecting failed with {type(error).__name__}: {error}"))
        raise


def _place(job: Job, device: int) -> torch.device:
    if job.where != "cuda":
        return torch.device(job.where)
    return torch.device("cuda", device % torch.cuda.device_count())
