"""The cached plan of an earlier run of the same request, and the key that identifies a request."""

import functools
import hashlib
import socket
from collections.abc import Mapping
from typing import Any

from ...core.cluster.cluster import cluster_json
from ...core.errors import PanpipeError
from ...core.files.limits import DOCUMENT
from ...core.plan.plan import Plan
from ...core.plan.validation.validate import validate
from ...core.plan.wording import plan_size
from ..devices.machine import measured_properties
from ..optimizer.optimizers import OptimizerFactory, state_share
from .automatic import Planning
from .plan_cache import CachedPlans, PlanCache, cache_folder, versions


class EarlierPlans:
    """The cached plans of one request. All ranks create one at the same time; the first rank reads and writes.

    Args:
        planning: the request.
        others: other values that the plan depends on, by name; they are compared as strings.
    """

    def __init__(self, planning: Planning, others: Mapping[str, Any]) -> None:
        self._planning, wanted = planning, planning.options.cached
        self._cache = PlanCache(cache_folder() if wanted else None, planning.report)
        self._key = _key(planning, others) if wanted else {}

    def find(self) -> CachedPlans | None:
        """The cached plans, the same on every rank; None if there are none."""
        found = self._planning.team.decide(self._found)
        return None if found is None else CachedPlans(*found)

    def keep(self, found: CachedPlans) -> None:
        """Write new plans to the cache."""
        if self._planning.team.first:
            self._cache.keep(self._key, found)

    def _found(self) -> tuple[list[Plan], float | None] | None:
        planning = self._planning
        found = self._cache.find(self._key)
        if found is None:
            return None
        try:
            for plan in found.plans:
                validate(plan)
                if plan.graph_hash != planning.operators.graph.hash or plan.mesh != planning.team.mesh:
                    raise PanpipeError("it is for another model or mesh")
        except PanpipeError as error:
            planning.report(f"the cached plan cannot be used, planning anew: {error}")
            return None
        plan = found.plans[0]
        planning.report(
            f"plan of an earlier run: {plan.schedule}, {plan_size(plan)} (from {self._cache.folder}; plan_cache=False "
            "plans anew)"
        )
        return list(found.plans), found.fastest_s


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
        "recompute": options.recompute,
        "boundaries": options.boundaries,
        "offload": options.offload if isinstance(options.offload, str) else sorted(options.offload.items()),
        "offload to": None if options.offload == "none" else options.tier,
        "shard": options.shard,
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
    return text if text.isprintable() and len(text) <= DOCUMENT.text else _digest(text)


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
