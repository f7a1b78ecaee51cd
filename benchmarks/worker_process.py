"""What benchmarks of several processes have in common: ranks, their resident memory on Linux, and other load."""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


def rank_environment(rank: int, port: int, size: int = 2) -> dict[str, str]:
    """The variables that torchrun sets for a rank of one host.

    Args:
        rank: number of the process.
        port: of the rendezvous.
        size: number of ranks.
    """
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
    }


def resident_bytes(field: str) -> int:
    """``VmRSS``, or ``VmHWM`` for its peak, of this process in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def reset_resident_peak() -> None:
    """Make ``VmHWM`` count from now on."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """A context in which this many other processes compute all the time."""
    context = multiprocessing.get_context("spawn")
    others = [context.Process(target=_compute, daemon=True) for _ in range(processes)]
    for each in others:
        each.start()
    try:
        yield
    finally:
        for each in others:
            each.kill()
            each.join()


def _compute() -> None:
    torch.set_num_threads(1)
    matrix = torch.randn(256, 256)
    while True:
        torch.mm(matrix, matrix)
