"""What worker processes of benchmarks have in common: the environment of a rank, and its resident memory on Linux."""

from pathlib import Path


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
