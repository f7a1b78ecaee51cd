"""Writing traces as Chrome JSON, which Perfetto opens and ``panpipe compare`` reads. Lossless, one event per line.

A process is a device and a thread is one of its queues, with the names of ``trace.py``, so that a prediction and a
measurement have tracks of the same names. Slices of one thread must not overlap: a message that is sent before the
previous one has arrived is on a second thread of the queue. A counter is a kind of memory of a device, what it holds on
its host, or one direction of a link, and an arrow leads from every send to its receive. Times are in microseconds, as
the format requires, with all decimal digits of the number.

Source of the format: "Trace Event Format", the Chromium project.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from ..actions import RECV_KINDS, SEND_KINDS
from ..errors import refuse_other_kinds
from ..files.write import write_text
from .trace import HOST_MEMORY, Trace, TraceEvent, queue_order, receive_queue, send_queue

FORMAT = "panpipe.trace/1"
MEMORY_COUNTER = "memory"
"""Its values, over all kinds, add up to the memory of a device."""
HOST_COUNTER = "host memory"
"""What a device holds on its host. Older traces have it in the counter of the device's memory."""
LINK_CATEGORY = "link"
LINK_RATE = "bytes_per_s"


def write_trace(trace: Trace, path: str | Path) -> None:
    """Write one trace to a file. The same trace gives the same bytes."""
    refuse_other_kinds("trace", trace, Trace, "a Trace, the second of what pipe.trace_step(batch) returns")
    write_text(path, trace_json(trace))


def trace_json(trace: Trace) -> str:
    """The text of a trace file."""
    header = {
        "label": "",
        "source": trace.source,
        "plan_hash": trace.plan_hash,
        "devices": trace.devices,
        "step_s": float(trace.step_s),
        "links": [[link.src, link.dst, _plain(link.bytes_per_s)] for link in trace.links],
    }
    other = json.dumps({"format": FORMAT, "traces": [header]})
    return f'{{"displayTimeUnit":"ms","otherData":{other},"traceEvents":[\n' + ",\n".join(_lines(trace)) + "\n]}\n"


def _lines(trace: Trace) -> Iterator[str]:
    lanes = _lanes(trace.events)
    placed = list(zip(trace.events, lanes, strict=True))
    queues = sorted({(event.device, queue_order(event.queue), event.queue, lane) for event, lane in placed})
    threads = {(device, queue, lane): number for number, (device, _, queue, lane) in enumerate(queues)}
    names = {device: f"device {device}" for device in range(trace.devices)}
    if trace.links:
        names[trace.devices] = "links"
    for pid, name in names.items():
        yield _record({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
        yield _record({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}})
    for (device, queue, lane), tid in threads.items():
        name = f"{queue} · {lane + 1}" if lane else queue
        yield _record({"ph": "M", "name": "thread_name", "pid": device, "tid": tid, "args": {"name": name}})
        order = {"sort_index": tid}
        yield _record({"ph": "M", "name": "thread_sort_index", "pid": device, "tid": tid, "args": order})
    at = [{"pid": event.device, "tid": threads[event.device, event.queue, lane]} for event, lane in placed]
    for event, where in zip(trace.events, at, strict=True):
        yield _event(event, where)
    yield from _arrows(trace, at)
    for sample in trace.memory:
        name = HOST_COUNTER if sample.kind == HOST_MEMORY else MEMORY_COUNTER
        record = {"ph": "C", "name": name, "pid": sample.device, "args": {sample.kind: _plain(sample.bytes)}}
        yield _record(record, ts=_microseconds(sample.time_s))
    for link in trace.links:
        record = {"ph": "C", "cat": LINK_CATEGORY, "name": f"{link.src} → {link.dst}", "pid": trace.devices}
        for time_s, rate in zip(link.times, link.rates, strict=True):
            yield _record(record | {"args": {LINK_RATE: _plain(rate)}}, ts=_microseconds(time_s))


def _event(event: TraceEvent, at: Mapping[str, int]) -> str:
    action = event.action
    args: dict[str, Any] = {
        "stage": action.stage,
        "kind": action.kind.value,
        "microbatch": action.microbatch,
        "device": event.device,
        "queue": event.queue,
    }
    if action.peer is not None:
        args["peer"] = action.peer
    args["bytes"] = _plain(event.bytes)
    if event.reported:
        args["reported"] = True
    start, end = _microseconds(event.start_s), _microseconds(event.end_s)
    record = {"ph": "X", "name": str(action), "cat": action.kind.value, **at, "args": args}
    return _record(record, ts=start, dur=end - start)


def _arrows(trace: Trace, at: Sequence[Mapping[str, int]]) -> Iterator[str]:
    """An arrow from every send to its receive; ``at`` is where each event is."""
    events = list(zip(trace.events, at, strict=True))
    found = {(e.device, e.queue, e.action): (e, where) for e, where in events if e.action.kind in RECV_KINDS}
    others = {send_queue(device): device for device in range(trace.devices)}
    for send, where in events:
        if send.action.kind not in SEND_KINDS or send.action.peer is None or send.queue not in others:
            continue
        counterpart = found.get((others[send.queue], receive_queue(send.device), send.action.counterpart))
        if counterpart is None:
            continue
        receive, there = counterpart
        arrow = {"name": "message", "cat": "message", "id": f"0:{send.device}:{send.action}"}
        # Perfetto attaches an arrow's head to the slice at its time, which must not be before the arrow's tail.
        landing = min(max(send.start_s, receive.start_s), receive.end_s)
        yield _record({"ph": "s", **arrow, **where}, ts=_microseconds(send.start_s))
        yield _record({"ph": "f", "bp": "e", **arrow, **there}, ts=_microseconds(landing))


def _lanes(events: Sequence[TraceEvent]) -> list[int]:
    """For each event the index of a thread of its queue: the first one without an event at that time."""
    lanes = [0] * len(events)
    free: dict[tuple[int, str], list[float]] = {}
    for number in sorted(range(len(events)), key=lambda number: (events[number].start_s, number)):
        event = events[number]
        ends = free.setdefault((event.device, event.queue), [])
        lane = next((lane for lane, end_s in enumerate(ends) if end_s <= event.start_s), len(ends))
        ends[lane : lane + 1] = [event.end_s]
        lanes[number] = lane
    return lanes


def _record(fields: Mapping[str, Any], **times: Decimal) -> str:
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
    return text[:-1] + "".join(f',"{name}":{_digits(value)}' for name, value in times.items()) + "}"


def _microseconds(seconds: float) -> Decimal:
    # From the number's shortest decimal text: the conversion to microseconds and back is exact.
    return Decimal(repr(float(seconds))).scaleb(6)


def _digits(value: Decimal) -> str:
    return format(value.normalize(), "f") if value else "0"


def _plain(size: float) -> float | int | None:
    """A number without needless digits; None if it is infinite (a link's rate), which JSON cannot represent."""
    if not math.isfinite(size):
        return None
    return int(size) if float(size).is_integer() else float(size)
