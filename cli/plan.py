"""``panpipe plan``: how an operator graph, or a model, trains on a cluster."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ..core.cluster import Cluster
from ..core.costs import StageCosts
from ..core.documents import as_plain
from ..core.errors import RequestError
from ..core.graph import OpGraph, read_graph
from ..core.plan import Plan, Prediction, plan_json
from ..core.planner import BUDGET, longest_path
from ..core.planner import plan as search_plan
from ..core.schedules.registry import families
from .clusters import find_cluster
from .output import bytes_text, note, print_json, print_table, seconds_text
from .progress import search_progress


def plan(
    *,
    cluster: Annotated[str, typer.Option(help="A cluster file, or cpu:N for N equal shares of this host.")],
    microbatches: Annotated[int, typer.Option(help="Microbatches in one step.")],
    graph: Annotated[Path | None, typer.Option(help="Operator-graph file with costs.", show_default=False)] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FACTORY",
            help="A function that returns (model, step, example_batch); its operators are timed on this host.",
            show_default=False,
        ),
    ] = None,
    memory_limit: Annotated[
        float | None,
        typer.Option(help="Bytes that a device may hold, where less than its memory.", show_default=False),
    ] = None,
    budget: Annotated[int, typer.Option(help="Most candidate plans to evaluate.")] = BUDGET,
    out: Annotated[Path | None, typer.Option(help="Write the plan here.", show_default=False)] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON alone.")] = False,
) -> None:
    """Choose stages, schedule and its parameters, and predict time and memory.

    A transfer takes the latencies of its path plus its bytes at the path's rate, and contends with no other.
    """
    machine = find_cluster(cluster)
    operators, sizes = _operators(graph, model, microbatches)
    with search_progress(budget) as progress:
        chosen = search_plan(
            operators,
            machine,
            microbatches,
            families=list(families().values()),
            oracle=longest_path,
            memory_limit=memory_limit,
            budget=budget,
            progress=progress,
            parameter_sizes=sizes,
        )
    if out is not None:
        _write(out, plan_json(chosen))
    if json:
        print_json(_answer(chosen))
    else:
        _print(chosen)
        if out is not None:
            print(f"Written to {out}.")


def _operators(graph: Path | None, model: str | None, microbatches: int) -> tuple[OpGraph, dict[str, int] | None]:
    """The operators to plan for, and the sizes of their parameters where they are known."""
    if (graph is None) == (model is None):
        raise RequestError("give one of --graph FILE and --model module:factory: they say what is planned")
    if graph is not None:
        return read_graph(graph), None
    from .models import measured_operators

    note("timing the model's operators on this host")
    return measured_operators(str(model), microbatches)


def _answer(plan: Plan) -> dict[str, Any]:
    """What ``--json`` prints: everything needed to evaluate the plan again."""
    prediction = _prediction(plan)
    return {
        "stages": [{"index": s.index, "device": s.device, "nodes": list(s.nodes)} for s in plan.stages],
        "device_actions": as_plain(plan.device_actions),
        "predicted_step_s": prediction.step_s,
        "peak_memory_bytes": list(prediction.peak_memory_bytes),
        "schedule": plan.schedule,
        "evaluations": prediction.evaluations,
        "efficiency": efficiency(plan),
    }


def efficiency(plan: Plan) -> float:
    """Σ compute ÷ (devices × predicted step); compute is F, I and W of all operators and microbatches."""
    prediction = _prediction(plan)
    compute_s = plan.microbatches * sum(_compute_s(cost) for cost in prediction.costs)
    return compute_s / (plan.devices * prediction.step_s) if prediction.step_s else 0.0


def _compute_s(cost: StageCosts) -> float:
    return cost.forward_s + cost.full_backward_s


def _prediction(plan: Plan) -> Prediction:
    assert plan.prediction is not None  # the planner always makes one
    return plan.prediction


def _print(plan: Plan) -> None:
    prediction = _prediction(plan)
    name = plan.model or "the graph"
    print(
        f"{name}: {len(plan.stages)} stages on {plan.devices} devices, {plan.microbatches} microbatches, "
        f"{plan.schedule}"
    )
    print(
        f"Step {seconds_text(prediction.step_s)}, efficiency {efficiency(plan):.1%}, "
        f"{prediction.evaluations} plans evaluated"
    )
    _print_stages(plan, prediction)
    _print_devices(plan, prediction.cluster, prediction)


def _print_stages(plan: Plan, prediction: Prediction) -> None:
    received = [0] * len(plan.stages)
    for edge in plan.edges:
        received[edge.dst] += edge.bytes
    rows = [
        (
            str(stage.index),
            stage.device,
            len(stage.nodes),
            stage.nodes[0],
            seconds_text(_compute_s(cost)),
            bytes_text(cost.state_bytes),
            bytes_text(cost.saved_bytes),
            bytes_text(received[stage.index]),
        )
        for stage, cost in zip(plan.stages, prediction.costs, strict=True)
    ]
    columns = ("stage", "on", "nodes", "from", "F + B", "state", "saved", "reads")
    print_table("Stages (F + B, saved and reads for each microbatch)", columns, rows)


def _print_devices(plan: Plan, cluster: Cluster, prediction: Prediction) -> None:
    rows = []
    for number, device in enumerate(cluster.devices):
        own = [prediction.costs[stage.index] for stage in plan.stages_on(number)]
        busy = plan.microbatches * sum(_compute_s(cost) for cost in own)
        rows.append(
            (
                f"{number} {device.name}",
                " ".join(str(stage.index) for stage in plan.stages_on(number)),
                f"{busy / prediction.step_s:.1%}" if prediction.step_s else "–",
                bytes_text(sum(cost.state_bytes for cost in own)),
                bytes_text(prediction.peak_saved_bytes[number]),
                bytes_text(prediction.peak_memory_bytes[number]),
                bytes_text(device.memory_bytes),
            )
        )
    columns = ("device", "stages", "busy", "state", "peak saved", "peak memory", "memory")
    print_table("Devices", columns, rows)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RequestError(f"cannot write '{path}': {error.strerror}; give a path in a folder that exists") from None
