"""Traces: what a simulated or measured step did, action by action. One format for every runner.

On disk a trace is a Perfetto (Chrome JSON) file, for eyes and for ``panpipe compare``: every event carries stage,
kind, microbatch and device in its ``args``.
"""

from attrs import frozen

from ..actions import Action


@frozen
class TraceEvent:
    """One action on one of a device's queues. Times in seconds from the start of the step.

    Args:
        device: its number.
        queue: ``compute``, ``send to N`` / ``receive from N`` with the other device's number, ``collectives``, or a
            queue of host copies.
        action: what was done. A communication ends when its bytes have arrived.
        start_s, end_s: when.
        bytes: what was moved; 0 for compute.
    """

    device: int
    queue: str
    action: Action
    start_s: float
    end_s: float
    bytes: float = 0


@frozen
class MemorySample:
    """From ``time_s`` on, ``device`` holds ``bytes`` of ``kind``.

    Kinds: parameters, gradients, optimizer, saved, communication, workspace.
    """

    device: int
    time_s: float
    kind: str
    bytes: float


@frozen
class LinkTrack:
    """What one direction of one link moved at each moment.

    Args:
        src, dst: names of the devices or hubs that it leads from and to.
        bytes_per_s: what it can move.
        times: seconds, ascending.
        rates: bytes/s, each from its time on until the next.
    """

    src: str
    dst: str
    bytes_per_s: float
    times: tuple[float, ...]
    rates: tuple[float, ...]


MEMORY_KINDS = ("parameters", "gradients", "optimizer", "saved", "communication", "workspace")


@frozen
class Trace:
    """One step.

    Args:
        source: ``simulated`` or ``measured``.
        plan_hash: the plan it ran.
        devices: how many.
        events: in order of start; within one queue in the order issued.
        memory: samples in order of time, where the runner knows.
        step_s: from the start of the step until the last device is done.
        links: use of the links, where the runner knows.
        reference_s: seconds that the reference workload took when the step was measured, or when what it was predicted
            from was (``runtimes/profile/reference_workload``); None where nobody measured it.
    """

    source: str
    plan_hash: str
    devices: int
    events: tuple[TraceEvent, ...]
    memory: tuple[MemorySample, ...]
    step_s: float
    links: tuple[LinkTrack, ...] = ()
    reference_s: float | None = None


COMPUTE_QUEUE = "compute"
COLLECTIVE_QUEUE = "collectives"
HOST_COPY_QUEUE = "host copies"
"""Copies to and from the host, where one queue has both directions."""
TO_HOST_QUEUE, FROM_HOST_QUEUE = "copies to host", "copies from host"
"""Where each direction has a queue."""


def send_queue(peer: int) -> str:
    """Name of the queue on which a device sends to device ``peer``."""
    return f"send to {peer}"


def receive_queue(peer: int) -> str:
    """Name of the queue on which a device receives from device ``peer``."""
    return f"receive from {peer}"
