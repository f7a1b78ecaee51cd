"""A cache of plans on disk, so that a second run of the same request on the same machine does not plan again.

Each plan is a JSON file, named by a hash of the request, and written atomically. One rank reads and writes, and sends
the plan to the others. A file that cannot be read or written is reported in one line, and the request is planned again.
"""

import functools
import hashlib
import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, field, frozen

from ...core.cluster.cluster import cluster_json
from ...core.documents import read_document, to_json
from ...core.errors import PanpipeError, RequestError, in_a_line
from ...core.files.limits import LONGEST_TEXT
from ...core.files.write import replace_file
from ...core.plain_data import exchanged
from ...core.plan.plan import Plan, check_possible_times
from ...core.plan.wording import plan_size
from ...core.search.suggestions.preference import MOST
from ...core.validation.validate import validate
from ...core.version import version
from ..devices.available_memory import measured_properties
from ..update.optimizers import OptimizerFactory, state_share
from .automatic import Planning
from .contest import Turn

FORMAT = "panpipe.cached-plan/3"
VARIABLE = "PANPIPE_CACHE"
"""The environment variable with the folder; if it is empty, nothing is cached."""
MOST_FILES, MOST_BYTES = 256, 256 << 20
"""Limits of the folder; above them the least recently used files are removed."""
ABANDONED_S = 3600.0
"""Age, in seconds, at which an incomplete file is removed."""


@exchanged
@frozen
class CachedPlans:
    """What an earlier run of a request found; the document of a file.

    Args:
        plans: the winner of the contest alone, or its candidates if it did not end.
        fastest: the winner's fastest step of each size; empty without a contest that ended.
    """

    plans: tuple[Plan, ...]
    fastest: tuple[Turn, ...] = ()
    key: dict[str, str] = field(factory=dict, eq=False)


def cache_folder() -> Path | None:
    """``$PANPIPE_CACHE``, or ``panpipe`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.

    None if ``$PANPIPE_CACHE`` is empty, or if there is no home folder.
    """
    own, shared = os.environ.get(VARIABLE), os.environ.get("XDG_CACHE_HOME", "")
    if own is not None:
        return Path(own).expanduser() if own else None
    if os.path.isabs(shared):  # the XDG specification ignores others
        return Path(shared) / "panpipe"
    try:
        return Path.home() / ".cache" / "panpipe"
    except RuntimeError:
        return None


def versions() -> dict[str, str]:
    """Versions that a plan depends on, with a hash of panpipe's sources, which change during development."""
    root = Path(__file__).parents[2]
    sources = [path for name in ("core", "backends", "runtimes", "simulators") for path in (root / name).rglob("*.py")]
    states = sorted((str(path.relative_to(root)), *path.stat()[6:9:2]) for path in sources)
    digest = hashlib.sha256(repr(states).encode()).hexdigest()[:16]
    return {"panpipe": f"{version()} {digest}", "torch": torch.__version__}


def _prune(folder: Path) -> None:
    """Remove the least recently used files above the limits, and old incomplete ones."""
    found = sorted(((path.stat(), path) for path in folder.glob("plan-*.json")), key=lambda each: -each[0].st_mtime)
    held = 0
    for count, (state, path) in enumerate(found, 1):
        held += state.st_size
        if count > MOST_FILES or held > MOST_BYTES:
            path.unlink(missing_ok=True)
    for path in folder.glob(".plan-*.part"):
        if time.time() - path.stat().st_mtime > ABANDONED_S:
            path.unlink(missing_ok=True)


class EarlierPlans:
    """The cached plans of one request. All ranks create one at the same time; the first rank reads and writes.

    Args:
        others: other values that the plan depends on, by name; they are compared as strings.
    """

    def __init__(self, planning: Planning, others: Mapping[str, Any]) -> None:
        wanted = planning.options.cache
        self._planning, self._key = planning, _key(planning, others) if wanted else {}
        name = f"plan-{_digest(json.dumps(self._key, sort_keys=True))[:40]}.json"
        folder = cache_folder() if wanted else None  # of this rank: that of the first rank counts
        self._path = None if folder is None else folder / name

    def find(self) -> CachedPlans | None:
        """The cached plans, the same on every rank; None if there are none that can be used, which is reported."""
        return self._planning.team.decide(self._read)

    def keep(self, found: CachedPlans) -> None:
        """Write new plans to the cache; reports a failure."""
        path = self._path
        if path is None or not self._planning.team.first:
            return
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # whatever the umask, plans are its owner's
            replace_file(path, [to_json(FORMAT, evolve(found, key=self._key)).encode()])
        except OSError as error:
            self._planning.report(f"the plan is not cached in '{path.parent}': {error.strerror or in_a_line(error)}")
            return
        with suppress(OSError):  # another process may remove the same files; the next plan prunes again
            _prune(path.parent)

    def _read(self) -> CachedPlans | None:
        path, planning, report = self._path, self._planning, self._planning.report
        try:
            if path is None or not path.exists():
                return None
            found = read_plans(path, self._key)
            wanted = planning.operators.graph.hash, planning.team.mesh
            if any((plan.graph_hash, plan.mesh) != wanted for plan in found.plans):
                raise RequestError("it is for another model or mesh")
        except (OSError, PanpipeError) as error:
            report(f"the cached plan '{path}' cannot be used, planning anew: {in_a_line(error)}")
            return None
        with suppress(OSError):  # the folder may be read-only
            os.utime(path)
        plan = found.plans[0]
        again = f"from {path.parent}; panpipe.Auto(cache=False) plans anew"
        report(f"plan of an earlier run: {plan.schedule}, {plan_size(plan)} ({again})")
        return found


def read_plans(path: Path, key: Mapping[str, str]) -> CachedPlans:
    """The document of a file.

    Raises:
        PanpipeError: it is damaged, is for another request, or has plans that cannot be compared.
    """
    found = read_document(path, FORMAT, CachedPlans)
    if found.key != dict(key):
        raise RequestError("it is for another request")
    if not 1 <= len(found.plans) <= MOST:
        raise RequestError(f"it has {len(found.plans)} plans, and not 1 to {MOST}")
    for turn in found.fastest:
        if turn.seconds <= 0 or turn.size < 1:
            raise RequestError(f"it has a step of {turn.seconds} s and {turn.size} elements: both are above 0")
    for plan in found.plans:
        validate(plan)
        check_possible_times(plan, str(path))
        if plan.prediction is None:
            raise RequestError("its plan has no prediction")
    return found


def _key(planning: Planning, others: Mapping[str, Any]) -> dict[str, str]:
    """The values that the plan depends on, as strings."""
    team, options, cluster = planning.team, planning.options, planning.options.cluster
    found: dict[str, Any] = {
        "graph": planning.operators.graph.hash,
        "shapes": planning.example.shape,
        "parameters": _parameters(planning),
        "microbatches": planning.microbatches,
        "mesh": team.mesh,
        "backend": team.kind.name,
        "schedules": [family.name for family in options.families],
        "other orders": options.anneal,
        "max_chunks": options.max_chunks,
        "recompute": options.memory.recompute,
        "boundaries": options.boundaries,
        "offload": options.offload if isinstance(options.offload, str) else sorted(options.offload.items()),
        "offload to": None if options.offload == "none" else options.memory.tier,
        "shard": options.shard,
        "limit": options.memory.limit,
        "optimizer": _optimizer(planning.optimizer),
        "cluster": None if cluster is None else _digest(cluster_json(cluster)),
        "machines": _machines(planning),
        **others,
        **versions(),
    }
    return {name: _text(value) for name, value in found.items()}


def _text(value: Any) -> str:
    """The repr; of one that a JSON file of panpipe cannot hold (torch breaks lines in it), a digest."""
    text = repr(value)
    return text if text.isprintable() and len(text) <= LONGEST_TEXT else _digest(text)


def _machines(planning: Planning) -> list[tuple[str, int]]:
    """Every device's machine, and the number of its host, in the order of the ranks."""
    team, where = planning.team, planning.measured.where
    found = team.everywhere(lambda device: (measured_properties(where[device], team.threads), socket.gethostname()))
    hosts = list(dict.fromkeys(host for _, host in found))
    return [(machine, hosts.index(host)) for machine, host in found]


def _parameters(planning: Planning) -> str:
    named = [
        (name, tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad)
        for values in (planning.measured.parameters, planning.measured.buffers)
        for name, tensor in values.items()
    ]
    return _digest(repr(named))


def _optimizer(make: OptimizerFactory | None) -> str:
    """An optimizer's name, its settings without numbers such as the learning rate, and the size of its state."""
    settings: dict[str, Any] = {}
    inner: Any = make
    while isinstance(inner, functools.partial):
        settings = {**inner.keywords, **settings}
        inner = inner.func
    kept = {name: value for name, value in sorted(settings.items()) if isinstance(value, bool | str | None)}
    name = f"{getattr(inner, '__module__', '')}.{getattr(inner, '__qualname__', type(inner).__name__)}"
    return f"{name} {kept} {state_share(make):g}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
