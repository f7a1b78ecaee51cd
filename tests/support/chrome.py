"""The rules of the Trace Event Format (the Chromium project) that Perfetto holds a file to."""

from collections import defaultdict
from numbers import Real

PHASES = {
    "M": {"name", "pid", "args"},
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "C": {"name", "pid", "ts", "args"},
    "s": {"name", "cat", "id", "pid", "tid", "ts"},
    "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"},
}
"""Per phase the fields that an event needs."""


def check_chrome(document: dict) -> None:
    """Assert that a trace is one: fields, slices that do not overlap, arrows in pairs, counters in order of time."""
    assert set(document) == {"displayTimeUnit", "otherData", "traceEvents"}
    named, slices = set(), defaultdict(list)
    arrows, counters = defaultdict(list), defaultdict(list)
    for event in document["traceEvents"]:
        assert event["ph"] in PHASES, event
        assert set(event) >= PHASES[event["ph"]], event
        for field in ("ts", "dur"):
            assert isinstance(event.get(field, 0), Real), event
            assert event.get(field, 0) >= 0, event
        if event["ph"] == "M" and event["name"] in ("process_name", "thread_name"):
            named.add((event["pid"], event.get("tid")))
        elif event["ph"] == "X":
            slices[event["pid"], event["tid"]].append(event)
        elif event["ph"] == "C":
            assert all(isinstance(value, Real) for value in event["args"].values())
            for series in event["args"]:
                counters[event["pid"], event["name"], series].append(event["ts"])
        elif event["ph"] in "sf":
            arrows[event["cat"], event["id"]].append(event)
    for track, found in slices.items():
        assert track in named
        assert (track[0], None) in named
        _check_slices(found)
    for times in counters.values():
        assert times == sorted(times)
    for pair in arrows.values():
        assert [event["ph"] for event in pair] == ["s", "f"]
        assert pair[0]["ts"] <= pair[1]["ts"]
        for event in pair:
            around = slices[event["pid"], event["tid"]]
            assert any(s["ts"] <= event["ts"] <= s["ts"] + s["dur"] + 1e-6 for s in around)


def _check_slices(found: list[dict]) -> None:
    end = 0.0
    for event in sorted(found, key=lambda event: (event["ts"], event["dur"])):
        # The sum of two decimal numbers may differ from the third in its last digit, once they are binary.
        assert event["ts"] >= end * (1 - 1e-12) - 1e-6, event
        end = event["ts"] + event["dur"]
