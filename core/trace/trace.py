"""Traces: the actions of a simulated or measured step with their times. All runners write the same format.

On disk a trace is a Chrome JSON file, which Perfetto displays and ``panpipe compare`` reads: every event has stage,
kind, microbatch and device in its ``args``.
"""

import re

from attrs import frozen

from ..actions import Action


@frozen
class TraceEvent:
    """One action on one of a device's queues. Times in seconds from the start of the step.

    Args:
        queue: ``compute``, ``send to N`` / ``receive from N`` with the other device's number, ``collectives``, or a
            queue of host copies.
        action: the action. A communication ends when its bytes have arrived.
        bytes: size of the message or copy; 0 for compute.
        reported: whether the transport reported when a measured message was under way; otherwise its end is when its
            reader had waited for it.
    """

    device: int
    queue: str
    action: Action
    start_s: float
    end_s: float
    bytes: float = 0
    reported: bool = False


@frozen
class MemorySample:
    """From ``time_s`` on, ``device`` holds ``bytes`` of ``kind``.

    Kinds: parameters, gradients, optimizer, saved, communication, workspace; and ``host``, the device's offloaded
    tensors, which are in its host's memory.
    """

    device: int
    time_s: float
    kind: str
    bytes: float


@frozen
class LinkTrack:
    """The rate of one direction of one link over time.

    Args:
        src, dst: names of the devices or hubs at its ends.
        times: seconds, ascending.
        rates: used bytes/s, each from its time until the next.
    """

    src: str
    dst: str
    bytes_per_s: float
    times: tuple[float, ...]
    rates: tuple[float, ...]


MEMORY_KINDS = ("parameters", "gradients", "optimizer", "saved", "communication", "workspace")
"""Kinds of a device's own memory."""
HOST_MEMORY = "host"


@frozen
class Trace:
    """One step.

    Args:
        source: ``simulated`` or ``measured``.
        plan_hash: hash of the plan.
        devices: number of devices.
        events: in order of start; within one queue in the order issued.
        memory: samples in order of time, if the runner records them.
        step_s: from the start of the step until the last device has finished.
        links: rates of the links, if the runner records them.
    """

    source: str
    plan_hash: str
    devices: int
    events: tuple[TraceEvent, ...]
    memory: tuple[MemorySample, ...]
    step_s: float
    links: tuple[LinkTrack, ...] = ()


COMPUTE_QUEUE = "compute"
COLLECTIVE_QUEUE = "collectives"
HOST_COPY_QUEUE = "host copies"
"""The queue of copies to and from the host, if one queue has both directions."""
TO_HOST_QUEUE, FROM_HOST_QUEUE = "copies to host", "copies from host"
"""The queues of copies, if each direction has its own."""


def send_queue(peer: int) -> str:
    """Name of the queue on which a device sends to device ``peer``."""
    return f"send to {peer}"


def receive_queue(peer: int) -> str:
    """Name of the queue on which a device receives from device ``peer``."""
    return f"receive from {peer}"


def queue_order(queue: str) -> tuple[int, int]:
    """Sorting key of queue names: compute first, then receives and sends by device, then every other queue."""
    if queue == COMPUTE_QUEUE:
        return 0, 0
    match = re.fullmatch(r"(receive from|send to) ([0-9]{1,7})", queue)
    return (3, 0) if match is None else (1 if match[1] == "receive from" else 2, int(match[2]))


def is_message_queue(queue: str) -> bool:
    """Whether it is a queue of messages to or from another device."""
    return queue_order(queue)[0] in (1, 2)
