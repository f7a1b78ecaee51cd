"""``panpipe backends``: all transports, which of them work here, and why the others do not."""

from collections.abc import Callable, Sequence
from typing import Any

from ..answers.options import argument, flag, json_flag, option
from ..answers.output import note, print_json, print_records
from ..backends.conformance import examine
from ..backends.kind import BackendKind, dtype_name
from ..backends.registry import BUILT_IN, find_backend, known_backends, plugins
from ..core.documents import as_plain
from ..core.errors import RequestError
from ..core.plugins import LeftOut


def backends(
    name: str | None = argument("Show only this one."),
    check: bool = flag("Run the conformance suite for it.", "--check"),
    devices: int = option("Number of devices for the suite.", 3, min=2),
    on: str | None = option("cpu or cuda: the device of the suite's tensors; cpu if the backend supports it."),
    json: bool = json_flag(),
) -> int:
    """Show transports: which work here, and why the others do not.

    Packages can add transports through the entry-point group panpipe.backends. With --check, exit status 1 means that a
    rule of the contract is broken.
    """
    if check and name is None:
        raise RequestError("--check runs the suite for one backend: name it, as in panpipe backends gloo --check")
    if check and name is not None:
        return _check(find_backend(name), devices, on, json)
    known = known_backends()
    if name is not None and name not in known:
        raise RequestError(f"there is no backend '{name}': known are {', '.join(known)}")
    shown = list(known.values()) if name is None else [known[name]]
    left_out = plugins()[1] if name is None else ()
    if json:
        print_json({"backends": [_answer(kind) for kind in shown], "left_out": as_plain(left_out)})
    else:
        _print(shown, left_out)
    return 0


def _answer(kind: BackendKind) -> dict[str, Any]:
    return {
        "name": kind.name,
        "summary": kind.summary,
        "available": kind.unavailable is None,
        "reason": kind.unavailable,
        "limits": kind.limits() if kind.unavailable is None else None,
        "runs": list(kind.runs),
        "device_types": sorted(kind.device_types),
        "dtypes": None if kind.dtypes is None else sorted(map(dtype_name, kind.dtypes)),
        "built_in": kind in BUILT_IN,
    }


def _print(shown: Sequence[BackendKind], left_out: Sequence[LeftOut]) -> None:
    columns: dict[str, str | Callable[[Any], object]] = {
        "backend": "name",
        "here": lambda kind: "yes" if kind.unavailable is None else "no",
        "devices are": lambda kind: ", ".join(kind.runs),
        "tensors on": lambda kind: ", ".join(sorted(kind.device_types)),
        "dtypes": lambda kind: "all" if kind.dtypes is None else ", ".join(sorted(map(dtype_name, kind.dtypes))),
        "from": lambda kind: "panpipe" if kind in BUILT_IN else "plug-in",
        "": "summary",
    }
    print_records("", shown, columns, texts=tuple(columns))
    for kind in shown:
        if kind.unavailable is not None:
            print(f"{kind.name} cannot be used here: {kind.unavailable}")
        elif (limits := kind.limits()) is not None:
            print(f"{kind.name}: {limits}")
    for one in left_out:
        print(one)


def _check(kind: BackendKind, devices: int, on: str | None, json: bool) -> int:
    where = on or ("cpu" if "cpu" in kind.device_types else min(kind.device_types))
    note(f"checking backend '{kind.name}' on {devices} devices, tensors on {where}")
    findings = examine(kind, devices, where=where)
    broken = sum(one.problem is not None for one in findings)
    if json:
        rules = [
            {"rule": one.rule.name, "text": one.rule.text, "workers": one.workers, "problem": one.problem}
            for one in findings
        ]
        print_json({"name": kind.name, "conforms": not broken, "rules": rules})
        return int(broken > 0)
    print_records(
        f"backend '{kind.name}' on {devices} devices", findings,
        {"rule": "rule.name", "over": "workers", "": lambda one: "kept" if one.problem is None else "BROKEN",
         "requirement": "rule.text"}, texts=("over", "requirement"),
    )  # fmt: skip
    for one in findings:
        if one.problem is not None:
            print(f"{one.rule.name}, over {one.workers}: {one.problem}")
    print(f"It breaks {broken} of {len(findings)} rules." if broken else "It passes all rules.")
    return int(broken > 0)
