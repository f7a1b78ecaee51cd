"""Files that are small and ask for much: each is used in this process, with limits of time and memory.

Prints, as JSON, what each file ended with. Run by ``test_fuzz.py`` as a process of its own.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.fuzz.cases import limit_memory, run_use
from tests.fuzz.formats import BLOCK, CATALOGUE, formats, write_valid
from tests.fuzz.mutations import dumped

Change = Callable[[Any], object]


def changed(name: str, change: Change) -> bytes:
    """The valid file with a change of its data."""
    data = json.loads(formats()[name].valid)
    change(data)
    return dumped(data)


def bombs() -> Iterator[tuple[str, str, int, bytes]]:
    """Name, format, number of the use, and bytes of each file."""
    for name, change in {
        "mesh.data 10^8": lambda d: d["mesh"].update(data=10**8),
        "mesh 10^5 × 10^5": lambda d: d["mesh"].update(data=10**5, pipeline=10**5),
        "microbatches 10^12": lambda d: d.update(microbatches=10**12),
        "microbatches 10^6": lambda d: d.update(microbatches=10**6),
        "deep": lambda d: d.update(model=json.loads("[" * 900 + "]" * 900)),
        "long name": lambda d: d.update(model="x" * 10**6),
        "wrong items": lambda d: d.update(stages=[0] * 10**6),
        "5,000 digits": lambda d: d.update(microbatches=10**5000),
    }.items():
        yield f"plan: {name}", "plan.json", 2, changed("plan.json", change)
    for value in (1e30, 10**19, 2**63, 1e300, 10**5000):
        for field in ("state_bytes", "saved_bytes", "forward_s"):
            data = changed("graph.json", lambda d, f=field, v=value: d["nodes"][1].update({f: v}))
            yield f"graph: {field} {float(value) if value < 1e308 else 'endless'}", "graph.json", 0, data
    for name, change in {
        "placement": {"placement": [0, 100_000_000]},
        "period": {"period": 10**12},
        "period 10^9": {"period": 10**9},
        "slots": {"forward": [0, 1, 2, 10**18]},
    }.items():
        yield f"block: {name}", "block.json", 0, json.dumps({**BLOCK, **change}).encode()
    for key, value in (
        ("nodes = 2", "nodes = 100000000"),
        ("nics = 1", "nics = 1000000000"),
        ("gpus = 2", "gpus = 999"),
    ):
        yield f"catalogue: {value}", "catalogue.toml", 1, CATALOGUE.replace(key, value).encode()
    yield "catalogue: deep key", "catalogue.toml", 0, CATALOGUE.encode() + b"[a" + b".a" * 400_000 + b"]"
    yield "catalogue: deep list", "catalogue.toml", 0, CATALOGUE.encode() + b"a = " + b"[" * 50_000
    devices = changed("trace.json", lambda d: d["otherData"]["traces"][0].update(devices=10**9))
    yield "trace: devices", "trace.json", 0, devices
    yield "trace: empty objects", "trace.json", 0, b'{"traceEvents": [{}' + b",{}" * 9_000_000 + b"]}"
    yield "plan: empty lists", "plan.json", 0, b"[[]" + b",[]" * 20_000_000 + b"]"
    yield "schedule: cell", "schedule.csv", 0, b"0F0," + b"1" * 200_000
    yield "schedule: cells", "schedule.csv", 0, b"," * 20_000_000
    yield "schedule: rows", "schedule.csv", 2, b"".join(b"%dF0,%dB0\r\n" % (i, i) for i in range(5000))
    yield "weights: header", "weights.safetensors", 0, (10**7).to_bytes(8, "little") + b"[" * 10**7


def main() -> None:
    found = {}
    with tempfile.TemporaryDirectory(prefix="panpipe-fuzz-") as name:
        folder = Path(name)
        write_valid(folder)
        (folder / "mutated").mkdir()
        for use in (0, 2):
            run_use("graph.json", use, folder / "graph.json", folder, seconds=300)  # compiles the search
        limit_memory()
        for title, format_name, use, data in bombs():
            file = folder / "mutated" / format_name
            file.write_bytes(data)
            print(title, file=sys.stderr, flush=True)
            outcome = run_use(format_name, use, file, folder)
            found[title] = [outcome.kind, outcome.text[-500:]]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
