"""Plans for tests of what reads plans: chains of stages by any schedule, with costs, a cluster and extra edges."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import panpipe
from attrs import evolve
from hypothesis import strategies as st
from panpipe.core.actions import Action, Kind, parse_action
from panpipe.core.cluster.cluster import Cluster, Hub, fully_connected
from panpipe.core.cluster.mesh import Mesh
from panpipe.core.cluster.routing import Link
from panpipe.core.costs.costs import StageCosts, StageEdge
from panpipe.core.plan.memory_policy import HostCopy, StageOffload, Storage
from panpipe.core.plan.plan import MemoryPolicy, Plan, Prediction, Stage, TiedWeight
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.registry import find_family
from panpipe.core.search import longest_path
from panpipe.runtimes.settings import PlanningOptions

from ..laws.grouped import grouped

UNIT = StageCosts(1.0, 1.0, 1.0, saved_bytes=100, workspace_bytes=7)


def orders(*rows: str) -> tuple[tuple[Action, ...], ...]:
    """Per device its actions, from text: ``"0F0 0B0"``."""
    return tuple(tuple(parse_action(word) for word in row.split()) for row in rows)


def table(name: str, devices: int, microbatches: int, chunks: int = 1, **parameters: Any) -> list[str]:
    """Per device the actions of a schedule for equal stages, as text."""
    schedule = find_family(name).build(ScheduleProblem(devices, microbatches, chunks), **parameters)
    return [" ".join(map(str, actions)) for actions in schedule.device_actions]


def plan_of(
    device_actions: tuple[tuple[Action, ...], ...],
    placement: Sequence[int],
    *,
    costs: Sequence[StageCosts] | None = None,
    cluster: Cluster | None = None,
    edges: Sequence[StageEdge] | None = None,
    tied: tuple[TiedWeight, ...] = (),
    data: int = 1,
    mesh_devices: tuple[tuple[int, ...], ...] | None = None,
    recompute: Sequence[int] = (),
    offload: Sequence[StageOffload] = (),
) -> Plan:
    """A plan of these orders. By default a chain of 10 bytes a hop, unit costs and own links without any delay."""
    stages = len(placement)
    devices = len(device_actions)
    chain = [StageEdge(i, i + 1, 10, 10) for i in range(stages - 1)]
    return Plan(
        model="test",
        graph_hash="",
        mesh=Mesh(devices, data, mesh_devices),
        microbatches=1 + max((a.microbatch or 0 for row in device_actions for a in row), default=0),
        schedule="by hand",
        stages=tuple(Stage(index, device, (f"operator{index}",)) for index, device in enumerate(placement)),
        edges=tuple(chain if edges is None else edges),
        device_actions=device_actions,
        tied=tied,
        memory=MemoryPolicy(tuple(recompute), tuple(offload)),
        prediction=Prediction(
            costs=tuple(costs or [UNIT] * stages),
            cluster=cluster or fully_connected(devices * data, 10**9, float("inf"), 0.0),
            step_s=1.0,
            peak_memory_bytes=(0.0,) * devices,
            peak_saved_bytes=(0.0,) * devices,
            bubble_ratio=0.0,
        ),
    )


def hosted(cluster: Cluster, bytes_per_s: float, latency_s: float = 0.0) -> Cluster:
    """The cluster with one host, and a link of its own from each device to it."""
    links = [Link(device.name, "host", bytes_per_s, latency_s) for device in cluster.devices]
    return evolve(cluster, hubs=(*cluster.hubs, Hub("host", "host")), links=(*cluster.links, *links))


def leaves(stage: int, size: int, *copies: str) -> StageOffload:
    """What leaves of a stage: one storage, and copies as text, ``"3: 0F4 1B0"``: microbatch, freed_at, reload_after."""
    found = []
    for copy in copies:
        microbatch, actions = copy.split(":")
        found.append(HostCopy(int(microbatch), *map(parse_action, actions.split())))
    return StageOffload(stage, (Storage(f"operator{stage}", size),), tuple(found))


def predicted(plan: Plan, step_s: float = 1.0) -> Plan:
    """The plan with a prediction from unit costs: what needs one does not have to measure."""
    free, cluster = (0.0,) * plan.devices, fully_connected(plan.devices, 10**9, float("inf"), 0.0)
    return evolve(plan, prediction=Prediction((UNIT,) * len(plan.stages), cluster, step_s, free, free, 0.2))


def scheduled(name: str, devices: int, microbatches: int, chunks: int = 1, **options: object) -> Plan:
    """A plan by a schedule's name; options as of ``plan_of``."""
    schedule = find_family(name).build(ScheduleProblem(devices, microbatches, chunks))
    return plan_of(schedule.device_actions, schedule.placement, **options)  # type: ignore[arg-type]


def split_backward(actions: Sequence[Action], delay: int) -> tuple[Action, ...]:
    """Every B as I, and its W up to ``delay`` actions later."""
    result: list[Action] = []
    waiting: list[Action] = []
    for action in actions:
        if action.kind is Kind.B:
            result.append(Action(action.stage, Kind.I, action.microbatch))
            waiting.append(Action(action.stage, Kind.W, action.microbatch))
        else:
            result.append(action)
        if len(waiting) > delay:
            result.append(waiting.pop(0))
    return (*result, *waiting)


@st.composite
def costs(draw: st.DrawFn) -> StageCosts:
    times = st.integers(0, 20).map(lambda ticks: ticks / 4)
    sizes = st.integers(0, 50)
    saved = draw(sizes)
    return StageCosts(
        forward_s=draw(times) + 0.25,
        backward_input_s=draw(times),
        backward_weight_s=draw(times),
        optimizer_s=draw(times),
        parameter_bytes=draw(sizes),
        gradient_bytes=draw(sizes),
        optimizer_bytes=draw(sizes),
        saved_bytes=saved,
        freed_by_input_bytes=draw(st.integers(0, saved)),
        created_by_input_bytes=draw(sizes),
        workspace_bytes=draw(sizes),
        recompute_s=draw(st.none() | times),
        input_bytes=draw(sizes),
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Valid plans: four schedules, uneven costs, skip edges, split and full backward, recompute, tied weights, own
    links."""
    devices = draw(st.integers(1, 4))
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved-1f1b", "looped"]))
    chunks = 1 if name == "1f1b" else draw(st.integers(1, 3))
    if name == "interleaved-1f1b":
        chunks = max(chunks, 2)
    microbatches = draw(st.integers(1, 5))
    schedule = find_family(name).build(ScheduleProblem(devices, microbatches, chunks))
    stages = len(schedule.placement)
    pairs = [(i, i + 1) for i in range(stages - 1)]
    if stages > 2:
        far = [(a, b) for a in range(stages) for b in range(a + 2, stages)]
        pairs = sorted({*pairs, *draw(st.lists(st.sampled_from(far), max_size=3))})
    edges = [
        StageEdge(a, b, draw(st.integers(0, 40)), draw(st.integers(1, 40)) if b == a + 1 else draw(st.integers(0, 40)))
        for a, b in pairs
    ]
    orders = schedule.device_actions
    if draw(st.booleans()):
        orders = tuple(split_backward(actions, draw(st.integers(0, 3))) for actions in orders)
    tied = (TiedWeight("embedding", (0, stages - 1), draw(st.integers(0, 40))),) if stages > 1 else ()
    rate, latency_s = draw(st.sampled_from([1.0, 16.0, float("inf")])), draw(st.sampled_from([0.0, 0.5, 3.0]))
    return plan_of(
        orders,
        schedule.placement,
        costs=[draw(costs()) for _ in range(stages)],
        cluster=fully_connected(devices, 10**9, rate, latency_s),
        edges=edges,
        tied=draw(st.sampled_from([(), tied])),
        recompute=[stage for stage in range(stages) if draw(st.booleans())],
    )


@st.composite
def offloading_plans(draw: st.DrawFn) -> Plan:
    """Plans as of ``plans`` in which any stage that does not recompute may offload any of its microbatches."""
    plan = draw(plans())
    assert plan.prediction is not None
    found = []
    for stage, cost in enumerate(plan.prediction.costs):
        if stage in plan.memory.recompute or cost.saved_bytes < 2:
            continue
        actions = plan.device_actions[plan.placement[stage]]
        at = {str(action): position for position, action in enumerate(actions)}
        copies = []
        for microbatch in range(plan.microbatches):
            first = at[f"{stage}F{microbatch}"] + 1
            last = at.get(f"{stage}B{microbatch}", at.get(f"{stage}I{microbatch}", 0)) - 1
            if first <= last and draw(st.booleans()):
                freed, back = sorted((draw(st.integers(first, last)), draw(st.integers(first, last))))
                copies.append(HostCopy(microbatch, actions[freed], actions[back]))
        if copies:
            parts = sorted({draw(st.integers(1, int(cost.saved_bytes))) for _ in range(2)})
            sizes = [parts[0], *(after - before for before, after in pairwise(parts))]
            storages = tuple(Storage(f"operator{stage}.{at}", size) for at, size in enumerate(sizes))
            found.append(StageOffload(stage, storages, tuple(copies)))
    cluster = hosted(
        plan.prediction.cluster, draw(st.sampled_from([1.0, 16.0, float("inf")])), draw(st.sampled_from([0.0, 0.5]))
    )
    memory = evolve(plan.memory, offload=tuple(found), host_copy_queues=draw(st.sampled_from([1, 2])))
    return evolve(plan, memory=memory, prediction=evolve(plan.prediction, cluster=cluster))


def options_of(**given: Any) -> PlanningOptions:
    """The options of an automatic plan whose plans are scored by their longest path."""
    groups = grouped(**given)
    return PlanningOptions.of(
        groups.get("plan") or panpipe.Auto(), groups.get("memory") or panpipe.Memory(), longest_path, longest_path
    )
