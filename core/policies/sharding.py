"""Sharding: what the replicas of a stage share, so that each holds a part (ZeRO, arXiv 1910.02054, section 5).

==============  ===========================================================  ====================================
level           what happens in a step                                       what a replica of n holds
==============  ===========================================================  ====================================
``none``        REDUCE_GRAD is an all-reduce; every replica steps everything parameters, gradients, optimizer state
``optimizer``   REDUCE_GRAD is a reduce-scatter: each replica has the sum    parameters, gradients, 1/n of the
                for its part. STEP steps this part. UNSHARD is an            optimizer state
                all-gather of the parameters
``gradients``   SCATTER_GRAD is a reduce-scatter after the backward of each  parameters, 1/n of the gradients and
                microbatch, which each replica adds to its part. STEP and    of the optimizer state, and memory
                UNSHARD as above                                             for the gradients that are on the way
``parameters``  as ``gradients``, but UNSHARD gathers the parameters for     1/n of all three, and of frozen parameters;
                runs of actions, and RESHARD frees them after each           the parameters whole during runs; memory
                                                                             for gradients as above
==============  ===========================================================  ====================================

With ``Mesh.sharing`` only groups of this many consecutive replicas share, and sums go over all groups (HSDP): n is the
size of a group. Context and expert ranks with the same parameters share gradients and parameters, too (``copies``);
their costs have their part of the optimizer already. A plan has a level for each of its stages. Costs are those of a
whole stage, everywhere; `replica_costs` is what one replica holds and computes.

With ``gradients`` a backward writes its gradients to *buckets*, each in a *slot* of memory. A complete bucket is summed
over the replicas while the backward continues, and then its slot is free again::

    slot 0    │ fills: bucket 5 │ is summed       │ fills: bucket 3 │ ...
    slot 1                      │ fills: bucket 4 │ is summed       │

So a device needs two slots of the largest bucket of its stages (`slots_bytes`), in addition to its part of the sums.
"""

from collections.abc import Sequence
from math import ceil

from attrs import evolve

from ..costs.costs import StageCosts
from ..costs.graph import OpGraph
from ..errors import RequestError
from ..plan.plan import Plan
from ..wording import first_of

NONE, OPTIMIZER, GRADIENTS, PARAMETERS = "none", "optimizer", "gradients", "parameters"
LEVELS = (NONE, OPTIMIZER, GRADIENTS, PARAMETERS)
"""The levels, from the one that holds most."""
SHARED = {
    OPTIMIZER: "the optimizer's state",
    GRADIENTS: "gradients and the optimizer's state",
    PARAMETERS: "parameters, gradients and the optimizer's state",
}
"""What replicas share, for people."""
AUTO = "auto"

SLOTS = 2
"""Slots of a stage whose replicas share gradients: one fills while the other is summed."""
_LARGEST_BUCKET = 25 << 20
"""Most bytes of a bucket of several gradients, as in ``runtimes/update/buckets``."""
_BUCKETS = 16
"""A stage has about this many buckets, if they are not limited by ``_LARGEST_BUCKET``: slots then take an eighth of the
gradients, and a transfer is still as large as that of a microbatch allows."""


def bucket_bytes(gradient_bytes: int) -> int:
    """Most bytes of a bucket of several gradients, in a stage whose replicas share gradients of this size."""
    return min(_LARGEST_BUCKET, max(1, ceil(gradient_bytes / _BUCKETS)))


def slots_bytes(gradient_bytes: int, largest_bytes: int) -> int:
    """Bytes of the slots of a stage whose replicas share gradients.

    Args:
        largest_bytes: of the largest gradient, which is not divided; 0 if it is unknown.
    """
    return min(gradient_bytes, SLOTS * max(bucket_bytes(gradient_bytes), largest_bytes))


def level_of(plan: Plan, stage: int) -> str:
    """What the replicas of a stage share."""
    return plan.shard[stage] if plan.shard else NONE


def part_of_gradients(level: str) -> bool:
    """Whether each replica holds a part of the gradients."""
    return LEVELS.index(level) >= LEVELS.index(GRADIENTS)


def part_of_parameters(level: str) -> bool:
    """Whether each replica holds a part of the parameters."""
    return LEVELS.index(level) >= LEVELS.index(PARAMETERS)


def shards(plan: Plan, stage: int) -> bool:
    """Whether a stage is sharded in the steps of a plan: of forwards alone if its replicas share parameters."""
    level = level_of(plan, stage)
    return level != NONE and plan.mesh.data > 1 and (part_of_parameters(level) or not plan.forward_only)


def shards_gradients(plan: Plan, stage: int) -> bool:
    """Whether each replica of a stage has a part of the gradients in the steps of a plan."""
    return shards(plan, stage) and part_of_gradients(level_of(plan, stage)) and not plan.forward_only


def shards_parameters(plan: Plan, stage: int) -> bool:
    """Whether each replica of a stage has a part of the parameters in the steps of a plan."""
    return shards(plan, stage) and part_of_parameters(level_of(plan, stage))


def unsharded_bytes(plan: Plan, costs: Sequence[StageCosts], stage: int) -> int:
    """Bytes that an UNSHARD of a stage gathers: all parameters where replicas share these, otherwise those that were
    stepped; ``costs`` are those of whole stages."""
    return costs[stage].parameter_bytes if shards_parameters(plan, stage) else costs[stage].gradient_bytes


def with_level(plan: Plan, level: str, sharing: int | None = None) -> Plan:
    """The plan with one level for all stages, among groups of ``sharing`` replicas; unchanged if it has one replica."""
    if level == NONE or plan.mesh.data == 1:
        return evolve(plan, shard=())
    return evolve(plan, shard=(level,) * len(plan.stages), mesh=evolve(plan.mesh, sharing=sharing))


def level_and_sharers(shard: str, *more: str) -> tuple[str, int | None]:
    """The level of a request such as ``parameters:8``, and the number of replicas that share; None for all.

    Args:
        more: other values than levels that are accepted.

    Raises:
        RequestError: the level is unknown, or the number is none of at least 2.
    """
    level, colon, count = shard.partition(":")
    check_level(level, *(() if colon else more))
    if not colon:
        return level, None
    if level == NONE or not count.isdecimal() or int(count) < 2:
        raise RequestError(
            f"shard is '{shard}': after the colon write how many replicas share, at least 2, as in {PARAMETERS}:8"
        )
    return level, int(count)


def replica_costs(plan: Plan, costs: Sequence[StageCosts]) -> Sequence[StageCosts]:
    """Per stage what one replica holds and computes: of a sharded stage 1/n of what is shared, and of its step.

    Slots are those of a device. They are counted with the stage that needs the largest.

    Args:
        costs: of whole stages.
    """
    if not any(shards(plan, stage) for stage in range(len(costs))):
        return costs
    slots = [slots_of_stage(c) if shards_gradients(plan, stage) else 0 for stage, c in enumerate(costs)]
    most: dict[int, int] = {}
    for stage, device in enumerate(plan.placement):
        if slots[stage] > slots[most.setdefault(device, stage)]:
            most[device] = stage
    data = plan.mesh.sharers
    return tuple(
        part_of(cost, data, level_of(plan, stage), slots=most[plan.placement[stage]] == stage)
        if shards(plan, stage)
        else cost
        for stage, cost in enumerate(costs)
    )


def slots_of_stage(cost: StageCosts) -> int:
    """Bytes of the slots that a stage needs whose replicas share gradients; ``cost`` is that of the whole stage."""
    return slots_bytes(cost.gradient_bytes, cost.largest_gradient_bytes)


def part_of(cost: StageCosts, replicas: int, level: str = OPTIMIZER, *, slots: bool = True) -> StageCosts:
    """The costs of one of some replicas of a stage that is sharded.

    Args:
        cost: of the whole stage.
        slots: whether its gradients include the slots of its device.
    """
    if level == NONE:
        return cost
    optimizer = ceil(cost.optimizer_bytes / replicas)
    gradients, sharers = cost.gradient_bytes, replicas * cost.copies
    if part_of_gradients(level):
        gradients = ceil(gradients / sharers) + (slots_of_stage(cost) if slots else 0)
    part = evolve(cost, gradient_bytes=gradients, optimizer_bytes=optimizer, optimizer_s=cost.optimizer_s / replicas)
    if not part_of_parameters(level):
        return part
    whole = cost.parameter_bytes
    return evolve(part, parameter_bytes=ceil(whole / sharers), shared_bytes=0, gathered_bytes=whole + cost.shared_bytes)


def part_of_graph(graph: OpGraph, replicas: int, level: str = OPTIMIZER) -> OpGraph:
    """As `part_of`, for all operators of a graph: ``state_bytes`` without parameter and gradient is optimizer state.

    Slots are those of a stage, and are not counted (see `graph_slots_bytes`).
    """
    if level == NONE:
        return graph
    nodes = []
    for node in graph.nodes:
        sharers = replicas * node.copies
        part = ceil(node.gradient_bytes / sharers)
        gradients = part if part_of_gradients(level) else node.gradient_bytes
        whole = node.held_parameter_bytes
        held = ceil(whole / sharers) if part_of_parameters(level) else whole
        held += gradients + ceil(node.optimizer_bytes / replicas)
        nodes.append(evolve(node, state_bytes=held, optimizer_s=node.optimizer_s / replicas))
    return evolve(graph, nodes=tuple(nodes))


def graph_slots_bytes(graph: OpGraph, devices: int) -> int:
    """Bytes of the slots of a device with an even share of a graph, in one stage whose replicas share gradients."""
    whole = sum(node.gradient_bytes for node in graph.nodes)
    return slots_bytes(ceil(whole / devices), max((node.undivided_bytes for node in graph.nodes), default=0))


def check_level(level: object, *more: str) -> None:
    """Refuse a value that is not a level of sharding.

    Args:
        more: other values that are accepted.

    Raises:
        RequestError: it is not one of these.
    """
    accepted = (*LEVELS, *more)
    if level in accepted:
        return
    listed = ", ".join(f"'{each}'" for each in accepted)
    raise RequestError(f"shard is {level!r}: give one of {listed}")


def check_sharding(plan: Plan) -> None:
    """Check the levels of a plan.

    Raises:
        RequestError: a level is unknown, there is not one for each stage, there is one replica, or stages that share a
            tied weight differ.
    """
    if not plan.shard:
        return
    if len(plan.shard) != len(plan.stages):
        raise RequestError(
            f"shard has {len(plan.shard)} levels and the plan has {len(plan.stages)} stages: give one for each, or none"
        )
    for level in plan.shard:
        check_level(level)
    if plan.mesh.data == 1 and any(level != NONE for level in plan.shard):
        stage = next(stage for stage, level in enumerate(plan.shard) if level != NONE)
        raise RequestError(
            f"stage {stage} has shard '{plan.shard[stage]}' and the mesh has one replica: replicas share; use a mesh "
            "with dp above 1, or remove shard"
        )
    for weight in plan.tied:
        found = {stage: level_of(plan, stage) for stage in weight.stages}
        if len(set(found.values())) > 1:
            listed = first_of([f"stage {stage} '{level}'" for stage, level in found.items()], 8)
            raise RequestError(
                f"the stages of tied weight '{weight.name}' have different shard levels ({listed}): they sum the same "
                "parts of its gradient; give all of them one level"
            )
