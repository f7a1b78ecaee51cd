"""Strangers that connect to the ports of a job, and say nothing, or what no rank would say."""

import os
import socket
from contextlib import suppress
from pathlib import Path

TIMES = 100
SENT = (b"", b"\xff" * 64, b"GET / HTTP/1.1\r\n\r\n", (1 << 62).to_bytes(8, "little") * 8, b"\x00" * 4096)


def listening(pid: int) -> list[int]:
    """The TCP ports at which a process listens."""
    links = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            links.append(os.readlink(path))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text(encoding="utf-8").splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in links:
                found.append(int(fields[1].rpartition(":")[2], 16))
    return sorted(set(found))


def visit(ports: list[int]) -> list[socket.socket]:
    """Connect to ports many times, and send what no rank would send.

    Returns:
        The connections, to be kept open.
    """
    kept = []
    for number in range(TIMES):
        for port in ports:
            with suppress(OSError):
                stranger = socket.create_connection(("127.0.0.1", port), timeout=5)
                kept.append(stranger)
                if sent := SENT[number % len(SENT)]:
                    stranger.sendall(sent)
    return kept
