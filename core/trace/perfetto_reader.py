"""Reading trace files: panpipe's own, and Chrome JSON of other programs whose events describe actions."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from ..actions import WORK_KINDS, Action, Kind
from ..documents import check_format
from ..errors import RequestError
from ..files.json_reader import parse_json
from ..files.limits import LARGEST_FLOAT, MOST_DEVICES, MOST_INDEX, TRACE, short
from ..files.read import read_text
from .perfetto import FORMAT, HOST_COUNTER, LINK_CATEGORY, LINK_RATE, MEMORY_COUNTER
from .trace import COMPUTE_QUEUE, LinkTrack, MemorySample, Trace, TraceEvent

MOST_NAME = 256
"""Characters of the name of a queue, a kind of memory or a link."""


def read_trace(path: str | Path) -> Trace:
    """Read a trace file.

    In addition to panpipe's own files, it reads any Chrome JSON whose complete events (``"ph": "X"``) have stage, kind,
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
            elif record.get("ph") == "C" and record.get("name") in (MEMORY_COUNTER, HOST_COUNTER):
                memory.extend(_read_memory(record))
            elif record.get("ph") == "C" and record.get("cat") == LINK_CATEGORY:
                rate = float(_number(record["args"][LINK_RATE]))
                rates.setdefault(_name(record["name"]), []).append((_seconds(_number(record["ts"])), rate))
        except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError, RequestError) as error:
            raise RequestError(
                f"{path}: event {number} of traceEvents is not an action: {_fault(error)}; write the trace again"
            ) from None
    if header is None and not events:
        raise RequestError(
            f"{path} holds no action: each event of a trace carries stage, kind, microbatch and device in its args"
        )
    return _assemble(header or {}, events, memory, rates, str(path))


def _load(path: str | Path) -> dict[str, Any]:
    data = parse_json(read_text(path, TRACE), str(path), TRACE, parse_float=Decimal)
    if isinstance(data, list):
        data = {"traceEvents": data}
    records = data.get("traceEvents") if isinstance(data, dict) else None
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise RequestError(f"{path} is not a trace: Chrome JSON holds a list 'traceEvents' of objects")
    assert isinstance(data, dict)
    return data


def _header(found: object, origin: str) -> dict[str, Any] | None:
    """What the header says of the trace; None for a file of another program, which has none."""
    if not isinstance(found, dict) or "format" not in found:
        return None
    check_format(found["format"], FORMAT, origin)
    traces = found.get("traces")
    if not isinstance(traces, list) or len(traces) != 1 or not isinstance(traces[0], dict):
        count = len(traces) if isinstance(traces, list) else "an unknown number of"
        raise RequestError(f"{origin} holds {count} traces, and one is read at a time: write each to its own file")
    try:
        one = traces[0]
        return {
            "links": [
                (_name(src), _name(dst), math.inf if rate is None else float(_number(rate)))
                for src, dst, rate in one.get("links", ())
            ],
            "step_s": float(_number(one["step_s"])),
            "devices": _index(one["devices"], MOST_DEVICES),
            "source": _name(one["source"]),
            "plan_hash": _name(one["plan_hash"]),
        }
    except (KeyError, TypeError, ValueError) as error:
        raise RequestError(
            f"the header of {origin} is not one of {FORMAT}: {_fault(error)}; write the trace again"
        ) from None


def _fault(error: Exception) -> str:
    """What is wrong with an event or a header, in one line."""
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)


def _thread_names(records: Iterable[Mapping[str, Any]]) -> dict[tuple[object, object], str]:
    return {
        _thread(record): args["name"]
        for record in records
        if record.get("ph") == "M" and record.get("name") == "thread_name"
        and isinstance(args := record.get("args"), dict) and isinstance(args.get("name"), str)
    }  # fmt: skip


def _thread(record: Mapping[str, Any]) -> tuple[object, object]:
    """The process and thread of a record: numbers, or texts in files of other programs."""
    return short(record.get("pid")), short(record.get("tid"))


def _read_event(record: Mapping[str, Any], queues: Mapping[tuple[object, object], str]) -> TraceEvent:
    args = record["args"]
    kind = Kind(_name(args["kind"]))
    if kind.whole_step is not None and (args["microbatch"] is None) != kind.whole_step:
        raise ValueError(
            f"{kind.value} has microbatch {short(args['microbatch'])}, and must have "
            f"{'none' if kind.whole_step else 'one'}"
        )
    action = Action(_index(args["stage"]), kind, _optional_index(args["microbatch"]), _optional_index(args.get("peer")))
    queue = args.get("queue")
    if queue is None:
        queue = COMPUTE_QUEUE if kind in WORK_KINDS else queues.get(_thread(record), kind.value)
    start, length = _number(record["ts"]), _number(record["dur"])
    if length < 0:
        raise ValueError(f"it lasts {length} µs, and a duration is at least 0")
    size = float(_number(args.get("bytes", 0)))
    device, times = _index(args["device"], MOST_DEVICES), (_seconds(start), _seconds(start + length))
    return TraceEvent(device, _name(queue), action, *times, size, args.get("reported") is True)


def _read_memory(record: Mapping[str, Any]) -> Iterator[MemorySample]:
    # A counter belongs to a process, which is a device; a file with one trace has the device's number as pid.
    for kind, size in record["args"].items():
        time_s = _seconds(_number(record["ts"]))
        yield MemorySample(_index(record["pid"], MOST_DEVICES), time_s, _name(kind), float(_number(size)))


def _seconds(microseconds: Decimal) -> float:
    return float(microseconds.scaleb(-6))


def _number(value: object) -> Decimal:
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        raise ValueError(f"{short(value)} is not a number")
    number = Decimal(value)
    if abs(number) > LARGEST_FLOAT:
        raise ValueError(f"{short(value)} is outside the range of numbers, up to {LARGEST_FLOAT:g}")
    return number


def _name(value: object) -> str:
    if not isinstance(value, str) or len(value) > MOST_NAME or not value.isprintable():
        raise ValueError(f"{short(value)} is not a name of at most {MOST_NAME} characters that can be printed")
    return value


def _index(value: object, below: int = MOST_INDEX) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < below:
        raise ValueError(f"{short(value)} is not a whole number from 0, below {below}")
    return value


def _optional_index(value: object) -> int | None:
    return None if value is None else _index(value)


def _assemble(
    header: Mapping[str, Any],
    events: Sequence[TraceEvent],
    memory: Sequence[MemorySample],
    rates: dict[str, list[tuple[float, float]]],
    origin: str,
) -> Trace:
    highest = max([event.device for event in events] + [sample.device for sample in memory], default=-1)
    devices = header.get("devices", highest + 1)
    if highest >= devices:
        raise RequestError(f"{origin} is of {devices} devices and names device {highest}: write the trace again")
    step_s = header.get("step_s", max((event.end_s for event in events), default=0.0))
    if not math.isfinite(step_s) or step_s < 0:
        raise RequestError(f"the step of {origin} takes {step_s} s: a time is finite and at least 0")
    links = []
    for src, dst, limit in header.get("links", ()):
        samples = rates.pop(f"{src} → {dst}", ())
        links.append(LinkTrack(src, dst, limit, tuple(time for time, _ in samples), tuple(rate for _, rate in samples)))
    if rates:
        raise RequestError(f"{origin} has rates of link {next(iter(rates))}, which it does not list: write it again")
    source, plan_hash = header.get("source", "measured"), header.get("plan_hash", "")
    return Trace(source, plan_hash, devices, tuple(events), tuple(memory), step_s, tuple(links))
