"""The implementation of ``panpipe plan``; not in ``plan``, so that a mistyped model is refused before slow imports."""

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import evolve

from ...core.cluster.cluster import Cluster
from ...core.cluster.mesh import least_by_position
from ...core.cluster.tensor_groups import consecutive_groups
from ...core.costs.partition import device_limits
from ...core.errors import RequestError, naming
from ...core.files.write import write_text
from ...core.offload.request import parse_offload
from ...core.plan.plan import Plan, plan_json
from ...core.plan.sharding import AUTO, check_level
from ...core.schedules.problem import ScheduleFamily
from ...core.schedules.registry import families, find_family, resident_families
from ...core.search.suggestions.fewer_devices import faster_alone
from ...core.search.suggestions.infeasible import NothingFits
from ...core.trace.throughput import StepTotals
from ...core.tradeoff import by_time
from ..clusters import find_cluster
from ..output import check_writable, note, print_json
from ..progress import search_progress
from .allowance import Allowance
from .answer import PlanAnswer
from .choices import judge_of, of_one_replica, oracle_of, replicas_allowed, wanted_meshes, wanted_recompute
from .costs import ModelRequest, PlanningCosts, graph_costs, model_costs
from .infeasible import refuse
from .request import PlanRequest
from .tensor import wanted_tensor, with_tensor_ranks

if TYPE_CHECKING:
    from ...core.search.confirm import SearchResult


def run(
    cluster: str,
    microbatches: int | None,
    *,
    graph: Path | None,
    model: str | None,
    batch: int | None,
    sequence: int | None,
    dtype: str | None,
    optimizer: str | None,
    memory_limit: float | None,
    mesh: str | None,
    recompute: str | None,
    offload: str | None,
    host_memory: float | None,
    schedule: str,
    budget: int | None,
    seconds: float | None,
    seed: int,
    layers: bool,
    samples: int | None,
    tokens: int | None,
    top: int | None,
    out: Path | None,
    json: bool,
    tp: str | None = None,
    shard: str = "none",
) -> None:
    """Search plans and print the best; the options are those of ``panpipe plan`` (``cli/plan``).

    Raises:
        RequestError: an option is wrong.
    """
    check_writable(out)
    if seconds is not None and not 0 < seconds < float("inf"):
        raise RequestError(f"--seconds is {seconds:g}: give a finite number above 0")
    files = [file for file in (graph, cluster) if file is not None and os.path.isfile(str(file).partition("#")[0])]
    found: list[tuple[PlanRequest, SearchResult]] = []
    failed: list[tuple[PlanRequest, NothingFits]] = []
    _check_counts(budget=budget)
    try_fewer, allowance = graph is not None and mesh is None, Allowance(budget, seconds)
    wanted = wanted_tensor(tp, find_cluster(cluster), cluster, model)
    for searches, tensor in zip(range(len(wanted), 0, -1), wanted, strict=True):
        share = allowance.share(searches, reserve=try_fewer)
        request, known = plan_request(
            cluster, microbatches, graph=graph, model=model, batch=batch, sequence=sequence, dtype=dtype,
            optimizer=optimizer, memory_limit=memory_limit, mesh=mesh, recompute=recompute, offload=offload,
            host_memory=host_memory, schedule=schedule, budget=share, seed=seed, layers=layers, samples=samples,
            tokens=tokens, tensor=tensor, shard=shard,
        )  # fmt: skip
        try:
            with naming(*files):
                request.prepare()
            with naming(*files), search_progress() as progress, allowance.timed(searches) as limit_s:
                result = request.search(seconds=limit_s, progress=progress, alternatives=top is not None)
            allowance.spend(result.evaluations)
            found.append((request, result))
        except NothingFits as nothing:
            failed.append((request, nothing))
    if not found:
        request, unfit = failed[-1]  # the most tensor ranks: the least memory on each
        refuse(unfit, request, json=json)
    request, result = by_time(
        found, lambda one: one[1].best.predicted.step_s, lambda one: max(one[1].best.predicted.peak_memory_bytes)
    )[0]
    if result.stopped:
        note(f"the search ended after --seconds with {result.evaluations} evaluations; this is the best plan so far")
    plans = result.plans[: top or 1]
    written = [] if out is None else _write(out, [with_tensor_ranks(plan, request.machine) for plan in plans])
    fewer = None
    if try_fewer and not result.stopped:
        fewer = faster_alone(plans[0], lambda devices: request.alone(devices, allowance))
    answer = plan_answer(request, known, plans, fewer)
    if json:
        print_json(answer.plain())
        return
    answer.show()
    if top is not None and top > len(plans):
        print(f"{len(plans)} of {top}: every other plan found is slower and has no lower peak on its fullest device.")
    if written:
        print(f"\nWritten to {', '.join(map(str, written))}.")


def plan_request(
    cluster: str,
    microbatches: int | None,
    *,
    graph: Path | None = None,
    model: str | None = None,
    batch: int | None = None,
    sequence: int | None = None,
    dtype: str | None = None,
    optimizer: str | None = None,
    memory_limit: float | None = None,
    mesh: str | None = None,
    recompute: str | None = None,
    offload: str | None = None,
    host_memory: float | None = None,
    schedule: str = "auto",
    budget: int | None = None,
    seed: int = 0,
    layers: bool = False,
    samples: int | None = None,
    tokens: int | None = None,
    tensor: int = 1,
    shard: str = "none",
) -> tuple[PlanRequest, Sequence[ScheduleFamily]]:
    """The request for the options of ``panpipe plan``.

    Returns:
        The request, whose costs are computed when they are first read, and the schedule families that may be used.

    Raises:
        RequestError: an option is wrong.
    """
    _check_counts(microbatches=microbatches, budget=budget)
    check_level(shard, AUTO)
    wanted_offload = parse_offload(offload or "none")
    known = resident_families() if wanted_offload == "none" else list(families().values())
    wanted = known if schedule == "auto" else [find_family(schedule)]
    if layers and (wanted_offload != "none" or all(family.offloads for family in wanted)):
        raise RequestError("--layers does not plan offload, whose storages are those of operators: give one of the two")
    machine, analytic_costs = find_cluster(cluster), replicas_allowed(graph is not None, cluster)
    machine = _with_host_memory(machine, host_memory)
    if tensor > 1:
        if wanted_offload != "none":
            raise RequestError(
                "--offload is given with --tp: copies of tensor ranks to their hosts cannot be planned; leave one out"
            )
        machine = consecutive_groups(machine, tensor)
    device_limits(machine, memory_limit)
    with naming(cluster):
        wanted_meshes(mesh, machine, analytic_costs=analytic_costs)
    if microbatches is None and (model is None or batch is None):
        raise RequestError("--microbatches is missing: give a step's number, or a bundled model's --batch")
    source = ModelRequest(model, batch, sequence, dtype, optimizer, tensor) if model else None

    @cache
    def costs_of(microbatches: int) -> PlanningCosts:
        return _costs(graph, source, machine, cluster, microbatches, StepTotals(samples, tokens))

    request = PlanRequest(
        costs_of, machine, microbatches, batch=batch or 1, families=wanted, anneal=schedule == "auto",
        oracle=oracle_of(graph is not None), mesh=mesh, analytic_costs=analytic_costs,
        recompute=wanted_recompute(recompute, analytic_costs=analytic_costs),
        memory_limit=memory_limit, budget=budget, seed=seed, offload=wanted_offload, judge=judge_of(graph is not None),
        boundaries="layers" if layers else "operators",
        shard=shard,
    )  # fmt: skip
    return request, known


def _with_host_memory(machine: Cluster, limit: float | None) -> Cluster:
    """The cluster with a limit on what each of its hosts may hold."""
    if limit is None:
        return machine
    if not 0 <= limit < float("inf"):
        raise RequestError(f"--host-memory is {limit:g}: give a finite number of bytes, at least 0")
    hubs = (evolve(hub, memory_bytes=int(limit)) if hub.kind == "host" else hub for hub in machine.hubs)
    return evolve(machine, hubs=tuple(hubs))


def _check_counts(**counts: int | None) -> None:
    """Refuse counts below 1; None means that the option is not given."""
    for option, count in counts.items():
        if count is not None and count < 1:
            raise RequestError(f"--{option} is {count}: give a whole number of at least 1")


def _write(out: Path, plans: Sequence[Plan]) -> list[Path]:
    """Write the best plan, and the others in the same folder: ``plan.json``, ``plan.2.json`` and so on."""
    paths = [out, *(out.with_suffix(f".{number}{out.suffix}") for number in range(2, len(plans) + 1))]
    check_writable(*paths)
    for path, plan in zip(paths, plans, strict=True):
        write_text(path, plan_json(plan))
    return paths


def plan_answer(
    request: PlanRequest, known: Sequence[ScheduleFamily], plans: Sequence[Plan], fewer: Plan | None
) -> PlanAnswer:
    """The answer for the plans that were found."""
    # Imported here: compiled code takes a second to load.
    from ...core.search.suggestions.unlimited_memory import unlimited_step_s

    limits = least_by_position(request.limits, plans[0].mesh.replicas)
    work, peaks = of_one_replica(request.costs, plans[0])
    unlimited_s = unlimited_step_s(plans[0], known, limits)
    first, *others = (with_tensor_ranks(plan, request.machine) for plan in plans)
    return PlanAnswer(first, limits, work, unlimited_s, peaks, others, fewer)


def _costs(
    graph: Path | None, model: ModelRequest | None, machine: Cluster, cluster: str, microbatches: int, work: StepTotals
) -> PlanningCosts:
    """The operators to plan for, with costs on the cluster's devices."""
    if (graph is None) == (model is None):
        raise RequestError("give one of --graph FILE and --model module:factory, to plan for")
    if graph is not None:
        return graph_costs(graph, work)
    assert model is not None
    return model_costs(model, machine, cluster, microbatches, work)
