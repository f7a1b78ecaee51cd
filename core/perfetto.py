"""Traces on disk: Chrome JSON, which Perfetto opens and ``panpipe compare`` reads. Lossless, one event a line.

A process is a device and a thread is one of its queues, under the names of ``core/trace.py``, so that the tracks of a
prediction and of a measurement carry the same names. A counter is a kind of memory, and an arrow leads from every
send to its receive. Times stand in microseconds, as the format wants, with every decimal digit that the number has.

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

from .actions import RECV_KINDS, SEND_KINDS, STEP_KINDS, WORK_KINDS, Action, Kind
from .documents import check_format, read_text
from .errors import RequestError
from .trace import COMPUTE_QUEUE, MemorySample, Trace, TraceEvent, receive_queue, send_queue

FORMAT = "panpipe.trace/1"
MEMORY_COUNTER = "memory"


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
    for event in trace.events:
        yield writer.event(event)
    yield from writer.arrows()
    for sample in trace.memory:
        args = {sample.kind: _plain(sample.bytes)}
        record = {"ph": "C", "name": MEMORY_COUNTER, "pid": writer.process(sample.device), "args": args}
        yield _record(record, ts=_microseconds(sample.time_s))


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
        names = sorted({(e.device, queue_order(e.queue), e.queue) for e in trace.events})
        self.threads = {(device, queue): i for i, (device, _, queue) in enumerate(names)}

    def process(self, device: int) -> int:
        # Same device, next trace: the neighbouring process, so that both stand below each other.
        return device * self.count + self.index

    def tracks(self) -> Iterator[str]:
        suffix = f" · {self.label}" if self.label else ""
        for device in range(self.trace.devices):
            pid = self.process(device)
            yield _record({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"device {device}{suffix}"}})
            yield _record({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}})
        for (device, queue), tid in self.threads.items():
            at = {"pid": self.process(device), "tid": tid}
            yield _record({"ph": "M", "name": "thread_name", **at, "args": {"name": queue}})
            yield _record({"ph": "M", "name": "thread_sort_index", **at, "args": {"sort_index": tid}})

    def event(self, event: TraceEvent) -> str:
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
        record = {"ph": "X", "name": str(action), "cat": action.kind.value, **self._at(event), "args": args}
        return _record(record, ts=start, dur=end - start)

    def arrows(self) -> Iterator[str]:
        found = {(e.device, e.queue, e.action): e for e in self.trace.events if e.action.kind in RECV_KINDS}
        others = {send_queue(device): device for device in range(self.trace.devices)}
        for send in self.trace.events:
            if send.action.kind not in SEND_KINDS or send.action.peer is None or send.queue not in others:
                continue
            receive = found.get((others[send.queue], receive_queue(send.device), send.action.counterpart))
            if receive is None:
                continue
            arrow = {"name": "message", "cat": "message", "id": f"{self.index}:{send.device}:{send.action}"}
            # Perfetto ties an arrow's head to the slice around its time and wants it no earlier than its tail.
            landing = min(max(send.start_s, receive.start_s), receive.end_s)
            yield _record({"ph": "s", **arrow, **self._at(send)}, ts=_microseconds(send.start_s))
            yield _record({"ph": "f", "bp": "e", **arrow, **self._at(receive)}, ts=_microseconds(landing))

    def _at(self, event: TraceEvent) -> dict[str, int]:
        return {"pid": self.process(event.device), "tid": self.threads[event.device, event.queue]}


def _record(fields: Mapping[str, Any], **times: Decimal) -> str:
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
    return text[:-1] + "".join(f',"{name}":{_digits(value)}' for name, value in times.items()) + "}"


def _microseconds(seconds: float) -> Decimal:
    # Through the number's shortest decimal text: no digit is lost on the way to microseconds and back.
    return Decimal(repr(float(seconds))).scaleb(6)


def _digits(value: Decimal) -> str:
    return format(value.normalize(), "f") if value else "0"


def _plain(size: float) -> float | int:
    return int(size) if float(size).is_integer() else float(size)


@frozen
class _Header:
    """What a file says of its one trace; None where a file from elsewhere says nothing."""

    source: str = "measured"
    plan_hash: str = ""
    devices: int | None = None
    step_s: float | None = None


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
    for number, record in enumerate(records):
        try:
            if record.get("ph") == "X" and "kind" in record.get("args", {}):
                events.append(_read_event(record, queues))
            elif record.get("ph") == "C" and record.get("name") == MEMORY_COUNTER:
                memory.extend(_read_memory(record))
        except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError, RequestError) as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise RequestError(f"{path}: event {number} of traceEvents is not an action: {reason}") from None
    if header is None and not events:
        raise RequestError(
            f"{path} holds no action: each event of a trace carries stage, kind, microbatch and device in its args"
        )
    return _assemble(header or _Header(), events, memory, str(path))


def _load(path: str | Path) -> dict[str, Any]:
    text = read_text(path)
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
        return _Header(
            str(traces[0]["source"]), str(traces[0]["plan_hash"]), int(traces[0]["devices"]), float(traces[0]["step_s"])
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
    if (args["microbatch"] is None) != (kind in STEP_KINDS):
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


def _assemble(header: _Header, events: Sequence[TraceEvent], memory: Sequence[MemorySample], origin: str) -> Trace:
    highest = max([event.device for event in events] + [sample.device for sample in memory], default=-1)
    devices = header.devices if header.devices is not None else highest + 1
    if highest >= devices:
        raise RequestError(f"{origin} says it has {devices} devices and names device {highest}: write the trace again")
    step_s = header.step_s if header.step_s is not None else max((event.end_s for event in events), default=0.0)
    if not math.isfinite(step_s) or step_s < 0:
        raise RequestError(f"{origin} says its step takes {step_s} s: a time is finite and at least 0")
    fields = asdict(header) | {"devices": devices, "step_s": step_s}
    return Trace(events=tuple(events), memory=tuple(memory), **fields)
