"""Traces on disk: Chrome JSON, which Perfetto opens and ``panpipe compare`` reads. Lossless, one event a line.

A process is a device and a thread is one of its queues, under the names of ``trace.py``, so that the tracks of a
prediction and of a measurement carry the same names. Slices of one thread must not overlap: a message that is sent
while the one in front of it has yet to arrive stands on a second thread of the queue. A counter is a kind of memory of
a device, or one direction of a link, and an arrow leads from every send to its receive. Times stand in microseconds, as
the format wants, with every decimal digit that the number has.

Source of the format: "Trace Event Format", the Chromium project.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from attrs import asdict, frozen

from ..actions import RECV_KINDS, SEND_KINDS, WORK_KINDS, Action, Kind
from ..documents import check_format, read_text
from ..errors import RequestError
from .trace import COMPUTE_QUEUE, LinkTrack, MemorySample, Trace, TraceEvent, receive_queue, send_queue

FORMAT = "panpipe.trace/1"
MEMORY_COUNTER = "memory"
LINK_CATEGORY = "link"
LINK_RATE = "bytes_per_s"
MOST_BYTES = 4 << 30
"""Of a trace that is read: a long step on many devices has millions of events."""


def write_trace(trace: Trace, path: str | Path) -> None:
    """Write one trace to a file. The same trace gives the same bytes."""
    Path(path).write_text(trace_json({"": trace}), encoding="utf-8")


def write_traces(traces: Mapping[str, Trace], path: str | Path) -> None:
    """Write several traces to one file, to look at side by side: ``{"predicted": …, "measured": …}``.

    A device's processes stand below each other. Such a file is for eyes: ``read_trace`` wants one trace a file.
    """
    Path(path).write_text(trace_json(traces), encoding="utf-8")


def trace_json(traces: Mapping[str, Trace]) -> str:
    """The text of a trace file; each trace under its label."""
    headers = [
        {
            "label": label,
            "source": trace.source,
            "plan_hash": trace.plan_hash,
            "devices": trace.devices,
            "step_s": float(trace.step_s),
            "links": [[link.src, link.dst, _endless(link.bytes_per_s)] for link in trace.links],
            **({} if trace.reference_s is None else {"reference_s": float(trace.reference_s)}),
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
        record = {"ph": "C", "name": MEMORY_COUNTER, "pid": writer.process(sample.device), "args": args}
        yield _record(record, ts=_microseconds(sample.time_s))
    for link in trace.links:
        record = {"ph": "C", "cat": LINK_CATEGORY, "name": f"{link.src} → {link.dst}", "pid": writer.links}
        for time_s, rate in zip(link.times, link.rates, strict=True):
            yield _record(record | {"args": {LINK_RATE: _plain(rate)}}, ts=_microseconds(time_s))


def queue_order(queue: str) -> tuple[int, int]:
    """Sorting key that puts compute first, then receives and sends by device, then every other queue."""
    if queue == COMPUTE_QUEUE:
        return 0, 0
    match = re.fullmatch(r"(receive from|send to) (\d+)", queue)
    return (3, 0) if match is None else (1 if match[1] == "receive from" else 2, int(match[2]))


class _Writer:
    """Numbers one trace's processes and threads."""

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
        # Same device, next trace: the neighbouring process, so that both stand below each other.
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
            # Perfetto ties an arrow's head to the slice around its time and wants it no earlier than its tail.
            landing = min(max(send.start_s, receive.start_s), receive.end_s)
            yield _record({"ph": "s", **arrow, **self._at(send, lane)}, ts=_microseconds(send.start_s))
            yield _record({"ph": "f", "bp": "e", **arrow, **self._at(receive, receive_lane)}, ts=_microseconds(landing))

    def _at(self, event: TraceEvent, lane: int) -> dict[str, int]:
        return {"pid": self.process(event.device), "tid": self.threads[event.device, event.queue, lane]}


def _lanes(events: Sequence[TraceEvent]) -> list[int]:
    """For each event which of its queue's threads has room for it, from 0: the first that is free at its start."""
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
    # Through the number's shortest decimal text: no digit is lost on the way to microseconds and back.
    return Decimal(repr(float(seconds))).scaleb(6)


def _digits(value: Decimal) -> str:
    return format(value.normalize(), "f") if value else "0"


def _endless(rate: float) -> float | int | None:
    """JSON has no infinity: a link without a limit is null."""
    return _plain(rate) if math.isfinite(rate) else None


def _plain(size: float) -> float | int:
    return int(size) if float(size).is_integer() else float(size)


@frozen
class _Header:
    """What a file says of its one trace; None where a file from elsewhere says nothing."""

    source: str = "measured"
    plan_hash: str = ""
    devices: int | None = None
    step_s: float | None = None
    links: tuple[tuple[str, str, float], ...] = ()
    reference_s: float | None = None


def read_trace(path: str | Path) -> Trace:
    """Read a trace file.

    Besides panpipe's own, any Chrome JSON is read whose complete events (``"ph": "X"``) carry stage, kind, microbatch
    and device in ``args``; events without a kind are passed over.

    Raises:
        RequestError: it is no Chrome JSON, holds several traces or none, is of another version, or an event is wrong.
    """
    data = _load(path)
    header = _header(data.get("otherData"), str(path))
    records = data["traceEvents"]
    queues = _thread_names(records)
    events: list[TraceEvent] = []
    memory: list[MemorySample] = []
    rates: dict[str, list[tuple[float, float]]] = {}
    for number, record in enumerate(records):
        try:
            if record.get("ph") == "X" and "kind" in record.get("args", {}):
                events.append(_read_event(record, queues))
            elif record.get("ph") == "C" and record.get("name") == MEMORY_COUNTER:
                memory.extend(_read_memory(record))
            elif record.get("ph") == "C" and record.get("cat") == LINK_CATEGORY:
                rate = float(record["args"][LINK_RATE])
                rates.setdefault(str(record["name"]), []).append((_seconds(Decimal(record["ts"])), rate))
        except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError, RequestError) as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise RequestError(f"{path}: event {number} of traceEvents is not an action: {reason}") from None
    if header is None and not events:
        raise RequestError(
            f"{path} holds no action: each event of a trace carries stage, kind, microbatch and device in its args"
        )
    return _assemble(header or _Header(), events, memory, rates, str(path))


def _load(path: str | Path) -> dict[str, Any]:
    text = read_text(path, MOST_BYTES)
    try:
        data = json.loads(text, parse_float=Decimal, parse_constant=_refuse_constant)
    except ValueError as error:
        raise RequestError(f"{path} is not a whole JSON file ({error}): write the trace again") from None
    if isinstance(data, list):
        data = {"traceEvents": data}
    records = data.get("traceEvents") if isinstance(data, dict) else None
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise RequestError(f"{path} is not a trace: Chrome JSON holds a list 'traceEvents' of objects")
    assert isinstance(data, dict)
    return data


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number that JSON knows")


def _header(found: object, origin: str) -> _Header | None:
    if not isinstance(found, dict) or "format" not in found:
        return None
    check_format(found["format"], FORMAT, origin)
    traces = found.get("traces")
    if not isinstance(traces, list) or len(traces) != 1 or not isinstance(traces[0], dict):
        count = len(traces) if isinstance(traces, list) else "an unknown number of"
        raise RequestError(f"{origin} holds {count} traces, and one is read at a time: write each to its own file")
    try:
        one = traces[0]
        links = tuple(
            (str(src), str(dst), math.inf if rate is None else float(rate)) for src, dst, rate in one.get("links", ())
        )
        reference = None if one.get("reference_s") is None else float(one["reference_s"])
        if reference is not None and not (math.isfinite(reference) and reference > 0):
            raise ValueError(f"its reference workload takes {reference} s, and a time is finite and above 0")
        return _Header(
            str(one["source"]), str(one["plan_hash"]), int(one["devices"]), float(one["step_s"]), links, reference
        )
    except (KeyError, TypeError, ValueError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise RequestError(f"the header of {origin} is not one of {FORMAT}: {reason}; write the trace again") from None


def _thread_names(records: Iterable[Mapping[str, Any]]) -> dict[tuple[object, object], str]:
    return {
        (record.get("pid"), record.get("tid")): str(record.get("args", {}).get("name"))
        for record in records
        if record.get("ph") == "M" and record.get("name") == "thread_name"
    }


def _read_event(record: Mapping[str, Any], queues: Mapping[tuple[object, object], str]) -> TraceEvent:
    args = record["args"]
    kind = Kind(args["kind"])
    if (args["microbatch"] is None) != kind.whole_step:
        raise ValueError(f"{kind.value} has microbatch {args['microbatch']}")
    action = Action(_index(args["stage"]), kind, _maybe(args["microbatch"]), _maybe(args.get("peer")))
    queue = args.get("queue")
    if queue is None:
        queue = COMPUTE_QUEUE if kind in WORK_KINDS else queues.get((record.get("pid"), record.get("tid")), kind.value)
    start, length = Decimal(record["ts"]), Decimal(record["dur"])
    if length < 0:
        raise ValueError(f"it lasts {length} µs, and a duration is at least 0")
    size = float(args.get("bytes", 0))
    return TraceEvent(_index(args["device"]), str(queue), action, _seconds(start), _seconds(start + length), size)


def _read_memory(record: Mapping[str, Any]) -> Iterator[MemorySample]:
    # The thread-less counter stands in a process, which is a device; merged files are not read, so pid is its number.
    for kind, size in record["args"].items():
        yield MemorySample(_index(record["pid"]), _seconds(Decimal(record["ts"])), str(kind), float(size))


def _seconds(microseconds: Decimal) -> float:
    return float(microseconds.scaleb(-6))


def _index(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is no number from 0 up")
    return value


def _maybe(value: object) -> int | None:
    return None if value is None else _index(value)


def _assemble(
    header: _Header,
    events: Sequence[TraceEvent],
    memory: Sequence[MemorySample],
    rates: dict[str, list[tuple[float, float]]],
    origin: str,
) -> Trace:
    highest = max([event.device for event in events] + [sample.device for sample in memory], default=-1)
    devices = header.devices if header.devices is not None else highest + 1
    if highest >= devices:
        raise RequestError(f"{origin} says it has {devices} devices and names device {highest}: write the trace again")
    step_s = header.step_s if header.step_s is not None else max((event.end_s for event in events), default=0.0)
    if not math.isfinite(step_s) or step_s < 0:
        raise RequestError(f"{origin} says its step takes {step_s} s: a time is finite and at least 0")
    links = []
    for src, dst, limit in header.links:
        samples = rates.pop(f"{src} → {dst}", ())
        times, moved = tuple(time_s for time_s, _ in samples), tuple(rate for _, rate in samples)
        links.append(LinkTrack(src, dst, limit, times, moved))
    if rates:
        raise RequestError(f"{origin} counts bytes of link {next(iter(rates))}, which it does not list: write it again")
    fields = asdict(header) | {"devices": devices, "step_s": step_s, "links": tuple(links)}
    return Trace(events=tuple(events), memory=tuple(memory), **fields)
