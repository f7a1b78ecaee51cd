"""``panpipe plan``: the request for its options, the search, and the answer.

It is not in ``cli/plan``, so that a mistyped model is refused before slow imports.
"""

import os
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import evolve, fields_dict, frozen

from ...core.cluster.catalog.find import CPU, find_cluster
from ...core.cluster.cluster import Cluster
from ...core.cluster.mesh import least_by_position
from ...core.cluster.tensor_groups import consecutive_groups
from ...core.costs.graph import read_graph
from ...core.costs.partition import device_limits
from ...core.errors import RequestError, naming
from ...core.files.write import write_text
from ...core.numba_cache import compile_notice
from ...core.offload.request import parse_offload
from ...core.plan.plan import Plan, plan_json
from ...core.policies.sharding import AUTO, level_and_sharers
from ...core.schedules.problem import ScheduleFamily
from ...core.schedules.registry import families, find_family, resident_families
from ...core.search import longest_path
from ...core.search.search_options import SearchOptions
from ...core.search.suggestions.changes import faster_alone
from ...core.search.suggestions.infeasible import NothingFits
from ...core.trace.throughput import StepTotals
from ...core.tradeoff import by_time
from ..output import check_writable, note, print_json
from ..progress import noted, search_progress
from .answer import PlanAnswer
from .costs import PlanningCosts, model_costs
from .infeasible import refuse
from .options import CONTEXT_OPTIONS, TENSOR_OPTIONS, PlanOptions
from .request import (
    LAYERS_IF_ENOUGH,
    PlanRequest,
    wanted_chunks,
    wanted_meshes,
    wanted_recompute,
    wanted_tensor,
    with_tensor_ranks,
)

if TYPE_CHECKING:
    from ...core.search.confirm import SearchResult


def run(
    options: PlanOptions, *, tp: str | None, seconds: float | None, top: int | None, out: Path | None, json: bool
) -> None:
    """Search plans and print the best.

    Raises:
        RequestError: an option is wrong.
        InfeasibleError: no plan fits.
    """
    check_writable(out)
    if seconds is not None and not 0 < seconds < float("inf"):
        raise RequestError(f"--seconds is {seconds:g}: give a finite number above 0")
    try_fewer = options.graph is not None and options.mesh is None
    limits = _Limits(options.budget, seconds)
    found, failed = _search(options, tp, limits.share(1 - FEWER if try_fewer else 1), alternatives=top is not None)
    if not found:
        request, unfit = failed[-1]  # the most tensor ranks: the least memory on each
        refuse(unfit, request, json=json)
    best, *_ = by_time(
        found, lambda one: one.plan.predicted.step_s, lambda one: max(one.plan.predicted.peak_memory_bytes)
    )
    request, result = best.request, best.result
    if result.stopped:
        note(f"the search ended after --seconds with {result.evaluations} evaluations; this is the best plan so far")
    plans = result.plans[: top or 1]
    written = [] if out is None else _write(out, [with_tensor_ranks(plan, request.machine) for plan in plans])
    fewer = None
    few = limits.share(FEWER / plans[0].devices.bit_length())
    if try_fewer and not result.stopped and few.budget != 0:
        fewer = faster_alone(plans[0], lambda devices: request.alone(devices, few.budget, few.seconds))
    answer = best.answer(plans, fewer)
    if json:
        print_json(answer.plain())
        return
    answer.show()
    if top is not None and top > len(plans):
        print(f"{len(plans)} of {top}: every other plan found is slower and has no lower peak on its fullest device.")
    if written:
        print(f"\nWritten to {', '.join(map(str, written))}.")


FEWER = 0.06
"""Share of a given budget and time for searches with fewer devices, where they follow."""


@frozen
class _Limits:
    """What searches may take: evaluations and seconds; None for no limit."""

    budget: int | None
    seconds: float | None

    def share(self, share: float) -> "_Limits":
        """A part of it, for each of several searches."""
        return _Limits(
            None if self.budget is None else int(self.budget * share),
            None if self.seconds is None else self.seconds * share,
        )


@frozen
class Found:
    """A request with the schedule families that it may use, and its result."""

    request: PlanRequest
    families: Sequence[ScheduleFamily]
    result: "SearchResult"

    @property
    def plan(self) -> Plan:
        """The fastest plan."""
        return self.result.best

    def answer(self, plans: Sequence[Plan], fewer: Plan | None = None) -> PlanAnswer:
        """The answer with some of the plans, the first of them in full.

        Args:
            fewer: a faster plan for fewer of the devices, if one is known.
        """
        # Imported here: compiled code takes a second to load.
        from ...core.search.suggestions.unlimited_memory import unlimited_step_s

        limits = least_by_position(self.request.limits, plans[0].mesh.replicas)
        costs, mesh = self.request.costs, plans[0].mesh
        peaks = costs.peak_flops_per_s and [costs.peak_flops_per_s[d] for d in mesh.cluster_devices[: mesh.ranks]]
        unlimited_s = unlimited_step_s(plans[0], self.families, limits)
        first, *others = (with_tensor_ranks(plan, self.request.machine) for plan in plans)
        return PlanAnswer(first, limits, costs.work, unlimited_s, peaks, others, fewer)


def _search(
    options: PlanOptions, tp: str | None, limits: _Limits, *, alternatives: bool
) -> tuple[list[Found], list[tuple[PlanRequest, NothingFits]]]:
    """Search with every number of tensor ranks; what was found, and the errors of searches in which nothing fits."""
    named = (options.graph, options.cluster)
    files = [file for file in named if file is not None and os.path.isfile(str(file).partition("#")[0])]
    found, failed = [], []
    others = _ranks(options)
    if options.graph is None:
        _refuse_without_ranks(options, tp)
    wanted = wanted_tensor(tp, find_cluster(options.cluster), options.cluster, options.model, others)
    each = limits.share(1 / len(wanted))
    budget = None if each.budget is None else max(each.budget, 1)
    for tensor in wanted:
        request, families = plan_request(evolve(options, budget=budget), tensor)
        try:
            with naming(*files), noted(lambda: "deriving the costs of operators"):
                _ = request.costs  # first, because the model may be wrong, and compiling takes longer
            with noted(lambda: "compiling the search"):
                from ...core.search.compiling import compile_ahead  # here: compiled code takes a second to load

                compiled = compile_ahead(note)  # does nothing if it is compiled
            with naming(*files), nullcontext() if compiled else compile_notice(note), search_progress() as progress:
                result = request.search(seconds=each.seconds, progress=progress, alternatives=alternatives)
            found.append(Found(request, families, result))
        except NothingFits as nothing:
            failed.append((request, nothing))
    return found, failed


def plan_request(options: PlanOptions, tensor: int = 1) -> tuple[PlanRequest, Sequence[ScheduleFamily]]:
    """The request for the options of ``panpipe plan``.

    Returns:
        The request, whose costs are computed when they are first read, and the schedule families that may be used.

    Raises:
        RequestError: an option is wrong.
    """
    if options.graph is not None:
        _refuse_model_options(options)
    level_and_sharers(options.shard, AUTO)
    offload = parse_offload(options.offload or "none")
    usable = resident_families() if offload == "none" else list(families().values())
    wanted = usable if options.schedule == "auto" else [find_family(options.schedule)]
    offloading = all(family.offloads for family in wanted)
    if options.layers and (offload != "none" or offloading):
        raise RequestError("--layers does not plan offload, whose storages are those of operators: give one of the two")
    of_graph = options.graph is not None
    machine = find_cluster(options.cluster)
    analytic_costs = not of_graph and CPU.fullmatch(options.cluster) is None
    machine = _with_host_memory(machine, options.host_memory)
    if tensor * _ranks(options) > 1:
        if offload != "none":
            raise RequestError(
                "--offload is given with --tp, --cp or --ep: copies of several ranks of a stage to hosts cannot be "
                "planned; leave one out"
            )
        machine = consecutive_groups(machine, tensor, options.cp, options.ep)
    device_limits(machine, options.memory_limit)
    with naming(options.cluster):
        wanted_meshes(options.mesh, machine, analytic_costs=analytic_costs)
    if options.microbatches is None and (options.model is None or options.batch is None):
        raise RequestError(
            "--microbatches is missing: give the number of microbatches of a step, or a bundled model's --batch"
        )

    @cache
    def costs_of(microbatches: int) -> PlanningCosts:
        return _costs(options, machine, microbatches, tensor)

    from ...simulators.oracle import simulated

    search = SearchOptions(
        families=wanted,
        anneal=options.schedule == "auto",
        oracle=longest_path if of_graph else simulated,  # a file's contract is the longest path
        judge=simulated if of_graph else None,
        recompute=wanted_recompute(options, analytic_costs=analytic_costs),
        memory_limit=options.memory_limit,
        budget=options.budget,
        seed=options.seed,
        offload=offload,
        shard=options.shard,
    )
    if (chunks := wanted_chunks(options.chunks, wanted)) is not None:
        search = evolve(search, min_chunks=chunks[0], max_chunks=chunks[1])
    boundaries = _boundaries(options, analytic_costs and offload == "none" and not offloading)
    microbatches, batch, mesh = options.microbatches, options.batch or 1, options.mesh
    request = PlanRequest(
        costs_of, machine, microbatches, batch, search, mesh, analytic_costs, boundaries, options.within
    )
    return request, usable


MODEL_OPTIONS = ("batch", "sequence", "dtype", "optimizer", "kernels", *TENSOR_OPTIONS, *CONTEXT_OPTIONS)
"""Options that a model's costs depend on, and those of a file do not."""


def _refuse_model_options(options: PlanOptions) -> None:
    for option in _given(options, MODEL_OPTIONS):
        raise RequestError(f"{option} is for a model, and the operators of --graph have their costs: leave it out")


def _refuse_without_ranks(options: PlanOptions, tp: str | None) -> None:
    """Refuse options for ranks that there are none of; ``--tp 1`` says so, and the same options may be for other runs.

    Raises:
        RequestError: an option needs ``--tp`` or ``--cp``.
    """
    for ranks, given, names in (("tp", tp is not None, TENSOR_OPTIONS), ("cp", options.cp > 1, CONTEXT_OPTIONS)):
        for option in () if given else _given(options, names):
            kind = "tensor" if ranks == "tp" else "context"
            raise RequestError(
                f"{option} is for {kind} ranks, and there is only one: give --{ranks} N, or leave it out"
            )


def _given(options: PlanOptions, names: Sequence[str]) -> list[str]:
    """Those of some options that are not at their default, as on the command line."""
    usual = fields_dict(PlanOptions)
    return [f"--{name.replace('_', '-')}" for name in names if getattr(options, name) != usual[name].default]


def _ranks(options: PlanOptions) -> int:
    """Number of context and expert ranks for each tensor rank.

    Raises:
        RequestError: an option is wrong.
    """
    if options.cp * options.ep == 1:
        return 1
    if options.model is None or CPU.fullmatch(options.cluster):
        raise RequestError(
            "--cp and --ep plan a model on a described cluster: give --model and name one, or leave them out"
        )
    if options.microbatches is None:
        raise RequestError("--cp and --ep share microbatches of a known size: give --microbatches")
    return options.cp * options.ep


def _boundaries(options: PlanOptions, usual: bool) -> str:
    """Where stages may end; ``usual``: between layers, if the model has enough."""
    if options.layers is None:
        return LAYERS_IF_ENOUGH if usual else "operators"
    return "layers" if options.layers else "operators"


def _with_host_memory(machine: Cluster, limit: float | None) -> Cluster:
    """The cluster with a limit on what each of its hosts may hold."""
    if limit is None:
        return machine
    hubs = (evolve(hub, memory_bytes=int(limit)) if hub.kind == "host" else hub for hub in machine.hubs)
    return evolve(machine, hubs=tuple(hubs))


def _write(out: Path, plans: Sequence[Plan]) -> list[Path]:
    """Write the best plan, and the others in the same folder: ``plan.json``, ``plan.2.json`` and so on."""
    paths = [out, *(out.with_suffix(f".{number}{out.suffix}") for number in range(2, len(plans) + 1))]
    check_writable(*paths)
    for path, plan in zip(paths, plans, strict=True):
        write_text(path, plan_json(plan))
    return paths


def _costs(options: PlanOptions, machine: Cluster, microbatches: int, tensor: int) -> PlanningCosts:
    """The operators to plan for, with costs on the cluster's devices."""
    graph, model, work = options.graph, options.model, StepTotals(options.samples, options.tokens)
    if (graph is None) == (not model):
        raise RequestError(
            "give one of --graph FILE and --model: a bundled model's name (panpipe catalog --models), module:factory, "
            "or a config.json"
        )
    if graph is not None:
        return PlanningCosts(read_graph(graph), {}, None, work)
    return model_costs(options, machine, microbatches, tensor)
