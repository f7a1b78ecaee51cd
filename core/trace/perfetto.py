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
    write_text(path, trace_json({"": trace}))


def trace_json(traces: Mapping[str, Trace]) -> str:
    """The text of a trace file; ``traces`` has each trace by its label."""
    headers = [
        {
            "label": label,
            "source": trace.source,
            "plan_hash": trace.plan_hash,
            "devices": trace.devices,
            "step_s": float(trace.step_s),
            "links": [[link.src, link.dst, _rate(link.bytes_per_s)] for link in trace.links],
        }
        for label, trace in traces.items()
    ]
    lines = [
        line
        for index, (label, trace) in enumerate(traces.items())
        for line in _lines(trace, _Writer(trace, label, index, len(traces)))
    ]
    header = json.dumps({"format": FORMAT, "traces": headers})
    return f'{{"displayTimeUnit":"ms","otherData":{header},"traceEvents":[\n' + ",\n".join(lines) + "\n]}\n"


def _lines(trace: Trace, writer: "_Writer") -> Iterator[str]:
    yield from writer.tracks()
    for event, lane in zip(trace.events, writer.lanes, strict=True):
        yield writer.event(event, lane)
    yield from writer.arrows()
    for sample in trace.memory:
        args = {sample.kind: _plain(sample.bytes)}
        name = HOST_COUNTER if sample.kind == HOST_MEMORY else MEMORY_COUNTER
        record = {"ph": "C", "name": name, "pid": writer.process(sample.device), "args": args}
        yield _record(record, ts=_microseconds(sample.time_s))
    for link in trace.links:
        record = {"ph": "C", "cat": LINK_CATEGORY, "name": f"{link.src} → {link.dst}", "pid": writer.links}
        for time_s, rate in zip(link.times, link.rates, strict=True):
            yield _record(record | {"args": {LINK_RATE: _plain(rate)}}, ts=_microseconds(time_s))


class _Writer:
    """The records of one trace, with the numbers of its processes and threads."""

    def __init__(self, trace: Trace, label: str, index: int, count: int) -> None:
        self.trace = trace
        self.label = label
        self.index = index
        self.count = count
        self.links = trace.devices * count + index
        self.lanes = _lanes(trace.events)
        names = sorted(
            {(e.device, queue_order(e.queue), e.queue, lane) for e, lane in zip(trace.events, self.lanes, strict=True)}
        )
        self.threads = {(device, queue, lane): i for i, (device, _, queue, lane) in enumerate(names)}

    def process(self, device: int) -> int:
        # The same device of the next trace has the next number, so that Perfetto displays it directly below.
        return device * self.count + self.index

    def tracks(self) -> Iterator[str]:
        suffix = f" · {self.label}" if self.label else ""
        for device in range(self.trace.devices):
            pid = self.process(device)
            yield _record({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"device {device}{suffix}"}})
            yield _record({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}})
        if self.trace.links:
            yield _record({"ph": "M", "name": "process_name", "pid": self.links, "args": {"name": f"links{suffix}"}})
            sort = {"sort_index": self.links}
            yield _record({"ph": "M", "name": "process_sort_index", "pid": self.links, "args": sort})
        for (device, queue, lane), tid in self.threads.items():
            at = {"pid": self.process(device), "tid": tid}
            name = f"{queue} · {lane + 1}" if lane else queue
            yield _record({"ph": "M", "name": "thread_name", **at, "args": {"name": name}})
            yield _record({"ph": "M", "name": "thread_sort_index", **at, "args": {"sort_index": tid}})

    def event(self, event: TraceEvent, lane: int) -> str:
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
        record = {"ph": "X", "name": str(action), "cat": action.kind.value, **self._at(event, lane), "args": args}
        return _record(record, ts=start, dur=end - start)

    def arrows(self) -> Iterator[str]:
        placed = list(zip(self.trace.events, self.lanes, strict=True))
        found = {(e.device, e.queue, e.action): (e, lane) for e, lane in placed if e.action.kind in RECV_KINDS}
        others = {send_queue(device): device for device in range(self.trace.devices)}
        for send, lane in placed:
            if send.action.kind not in SEND_KINDS or send.action.peer is None or send.queue not in others:
                continue
            counterpart = found.get((others[send.queue], receive_queue(send.device), send.action.counterpart))
            if counterpart is None:
                continue
            receive, receive_lane = counterpart
            arrow = {"name": "message", "cat": "message", "id": f"{self.index}:{send.device}:{send.action}"}
            # Perfetto attaches an arrow's head to the slice at its time, which must not be before the arrow's tail.
            landing = min(max(send.start_s, receive.start_s), receive.end_s)
            yield _record({"ph": "s", **arrow, **self._at(send, lane)}, ts=_microseconds(send.start_s))
            yield _record({"ph": "f", "bp": "e", **arrow, **self._at(receive, receive_lane)}, ts=_microseconds(landing))

    def _at(self, event: TraceEvent, lane: int) -> dict[str, int]:
        return {"pid": self.process(event.device), "tid": self.threads[event.device, event.queue, lane]}


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


def _rate(rate: float) -> float | int | None:
    """A link's bandwidth; None if it is infinite, which JSON cannot represent."""
    return _plain(rate) if math.isfinite(rate) else None


def _plain(size: float) -> float | int:
    return int(size) if float(size).is_integer() else float(size)
