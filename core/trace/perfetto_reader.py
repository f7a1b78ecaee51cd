"""Reading trace files: panpipe's own, and Chrome JSON of other programs whose events describe actions."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from attrs import asdict, frozen

from ..actions import WORK_KINDS, Action, Kind
from ..documents import check_format, read_text
from ..errors import RequestError
from .perfetto import FORMAT, LINK_CATEGORY, LINK_RATE, MEMORY_COUNTER
from .trace import COMPUTE_QUEUE, LinkTrack, MemorySample, Trace, TraceEvent

MOST_BYTES = 4 << 30
"""Size limit of a trace to read: a long step on many devices has millions of events."""


@frozen
class _Header:
    """The header of a file; a file of another program has none, and these defaults apply."""

    source: str = "measured"
    plan_hash: str = ""
    devices: int | None = None
    step_s: float | None = None
    links: tuple[tuple[str, str, float], ...] = ()
    reference_s: float | None = None


def read_trace(path: str | Path) -> Trace:
    """Read a trace file.

    Besides panpipe's own files, it reads any Chrome JSON whose complete events (``"ph": "X"``) have stage, kind,
    microbatch and device in ``args``; events without a kind are ignored.

    Raises:
        RequestError: the file is not Chrome JSON, has several traces or none, is of another version, or an event is
            wrong.
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
    raise ValueError(f"{name} is not a number in JSON")


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
    times = _seconds(start), _seconds(start + length)
    return TraceEvent(_index(args["device"]), str(queue), action, *times, size, args.get("reported") is True)


def _read_memory(record: Mapping[str, Any]) -> Iterator[MemorySample]:
    # A counter belongs to a process, which is a device; a file with one trace has the device's number as pid.
    for kind, size in record["args"].items():
        yield MemorySample(_index(record["pid"]), _seconds(Decimal(record["ts"])), str(kind), float(size))


def _seconds(microseconds: Decimal) -> float:
    return float(microseconds.scaleb(-6))


def _index(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a whole number from 0")
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
        raise RequestError(f"{origin} is of {devices} devices and names device {highest}: write the trace again")
    step_s = header.step_s if header.step_s is not None else max((event.end_s for event in events), default=0.0)
    if not math.isfinite(step_s) or step_s < 0:
        raise RequestError(f"the step of {origin} takes {step_s} s: a time is finite and at least 0")
    links = []
    for src, dst, limit in header.links:
        samples = rates.pop(f"{src} → {dst}", ())
        times, moved = tuple(time_s for time_s, _ in samples), tuple(rate for _, rate in samples)
        links.append(LinkTrack(src, dst, limit, times, moved))
    if rates:
        raise RequestError(f"{origin} has rates of link {next(iter(rates))}, which it does not list: write it again")
    fields = asdict(header) | {"devices": devices, "step_s": step_s, "links": tuple(links)}
    return Trace(events=tuple(events), memory=tuple(memory), **fields)
