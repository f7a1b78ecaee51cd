"""Applying a plan's cut to the same step, captured again: with symbolic sizes, for another shape, or for evaluation.

A step captured for other shapes has mostly the same nodes, but they may be grouped into other operators: with one row,
or with sequences of length 1, other tensors are contiguous and other operators are views. Some nodes appear or
disappear: an ``expand`` that does nothing, one more iteration of a loop over time. So the stages of
*nodes* are carried over:

1. Nodes of both captures are aligned in order, by module and operator, as a diff aligns two versions of a text.
2. An operator gets the stage of its first computing node; one with new nodes only gets the stage of the operator before
   it.
3. Parameters, and buffers that the step writes, keep their stages: operators that read them get a stage that has them.
   So the step without its backward, in evaluation mode, reads BatchNorm's statistics where training writes them.
4. Stages do not descend along the edges. If that contradicts the above, an operator moves by as few stages as possible.
5. If that is not enough, operators that the cut would divide are divided there, as far as values allow.

A stage may get no operators; it then does nothing for microbatches of that shape.
"""

import itertools
from collections.abc import Collection, Hashable, Mapping, Sequence

from attrs import evolve, frozen
from torch import fx

from ...costs.graph import OpGraph, OpNode, stage_of_nodes
from ...errors import RequestError
from ..graph.autograd_functions import called_name
from ..graph.nodes import aligned, module_of
from ..values.user_lines import line_of, message_start
from .operators import Operators, computes, operators_of


@frozen
class Cut:
    """A cut in a form that applies to other captures.

    Args:
        nodes: in order, module and operator of every node of the captured graph, and its stage; None without one.
        parameters: that each stage holds.
        buffers: buffers that the step writes → the stage that holds them.
    """

    nodes: tuple[tuple[Hashable, int | None], ...]
    parameters: tuple[frozenset[str], ...]
    buffers: Mapping[str, int]

    def with_unused(self, stages: Mapping[str, int], buffers: Collection[str]) -> "Cut":
        """The cut for captures that also use tensors that the planned step does not use.

        Args:
            stages: name of each of these parameters and buffers → the stage that holds it.
            buffers: names of the model's buffers.
        """
        parameters = [
            held.union(name for name, stage in stages.items() if stage == index and name not in buffers)
            for index, held in enumerate(self.parameters)
        ]
        mine = {name: stage for name, stage in stages.items() if name in buffers}
        return evolve(self, parameters=tuple(parameters), buffers={**mine, **self.buffers})


def cut_of(operators: Operators, stages: Sequence[Sequence[str]]) -> Cut:
    """The cut of a captured step into stages.

    Args:
        operators: the captured step.
        stages: names of the operators of every stage.
    """
    where = stage_of_nodes(operators.graph, stages)
    stage = {member: where[owner] for member, owner in operators.owner.items()}
    nodes, written = operators.graph.nodes, operators.step.mutated_buffers
    return Cut(
        tuple((_identity(node), stage.get(node.name)) for node in _calls(operators)),
        tuple(
            frozenset(p for node in nodes if where[node.name] == index for p in node.parameters)
            for index in range(len(stages))
        ),
        {buffer: where[node.name] for node in nodes for buffer in _buffers(operators, node, written)},
    )


Stages = tuple[tuple[str, ...], ...]
"""Names of the operators of every stage, in the graph's order."""


def carry_over(cut: Cut, operators: Operators) -> tuple[Operators, Stages]:
    """The stages of a step that was captured for another shape.

    Args:
        cut: of the planned step.
        operators: the other capture.

    Returns:
        The other capture, with some operators divided if necessary, and its stages.

    Raises:
        RequestError: no cut of the other capture keeps parameters and written buffers where they are.
    """
    known = _known(cut, operators)
    try:
        return operators, _stages(cut, operators, known)
    except RequestError:
        divided = operators_of(operators.step, apart=_where_cut(operators, known))
        return divided, _stages(cut, divided, known)


def _where_cut(operators: Operators, known: Mapping[str, int]) -> set[str]:
    """Nodes that are in another stage than the node before them in the same operator."""
    found = set()
    for members in operators.members.values():
        staged = [name for name in members if name in known]
        found |= {b for a, b in itertools.pairwise(staged) if known[a] != known[b]}
    return found


def _stages(cut: Cut, operators: Operators, known: Mapping[str, int]) -> Stages:
    graph = operators.graph
    allowed = {node.name: _allowed(cut, operators, node) for node in graph.nodes}
    latest = _latest(operators, allowed)
    preferred = _preferred(operators, known)
    sources = _sources(graph)
    where: dict[str, int] = {}
    for node, wanted in zip(graph.nodes, preferred, strict=True):
        earliest = max((where[source] for source in sources[node.name]), default=0)
        possible = [stage for stage in allowed[node.name] if earliest <= stage <= latest[node.name]]
        where[node.name] = min(possible, key=lambda stage: (abs(stage - wanted), stage))
    return tuple(
        tuple(node.name for node in graph.nodes if where[node.name] == index) for index in range(len(cut.parameters))
    )


def _calls(operators: Operators) -> list[fx.Node]:
    return [node for node in operators.step.graph.nodes if node.op == "call_function"]


def _identity(node: fx.Node) -> Hashable:
    return module_of(node), str(node.target), called_name(node)


def _buffers(operators: Operators, node: OpNode, written: Collection[str]) -> list[str]:
    """The written buffers that an operator reads or writes."""
    step = operators.step
    read = {s.name for member in operators.members[node.name] for s in operators.nodes[member].all_input_nodes}
    return sorted({step.buffers[name] for name in read if name in step.buffers}.intersection(written))


def _allowed(cut: Cut, operators: Operators, node: OpNode) -> list[int]:
    """The stages that hold what an operator reads."""
    everywhere = range(len(cut.parameters))
    homes = {name: [i for i in everywhere if name in cut.parameters[i]] for name in node.parameters}
    # A buffer that this capture only reads, as in evaluation, is in the stage where the planned step writes it.
    written = {*cut.buffers, *(operators.step.mutated_buffers if operators.step.gradients else ())}
    homes |= {name: [cut.buffers[name]] if name in cut.buffers else [] for name in _buffers(operators, node, written)}
    missing = next((name for name, stages in homes.items() if not stages), None)
    if missing is not None:
        raise RequestError(
            f"{_line(operators, node.name)}'{node.name}' uses '{missing}', which no stage holds: the planned step does "
            "not use it in this way; give an example batch for which it does, or, if it was added to the model later, "
            "build another pipeline after that"
        )
    found = [stage for stage in everywhere if all(stage in stages for stages in homes.values())]
    if not found:
        first, *others = homes
        other = next((name for name in others if not {*homes[name]} & {*homes[first]}), others[-1])
        fix = "give batches of the example's shape with the Python values of the first step, or build another pipeline"
        if not operators.step.gradients:
            fix = (
                "call the model without a loop over its results; generation needs the whole model: call "
                "model.generate(...) itself in one process, or pipe.save(folder) and load it"
            )
        raise RequestError(
            f"{_line(operators, node.name)}'{node.name}' uses '{first}' of stage {homes[first][0]} and '{other}' of "
            f"stage {homes[other][0]} at once, and one stage must hold both: {fix}"
        )
    return found


def _latest(operators: Operators, allowed: Mapping[str, list[int]]) -> dict[str, int]:
    """Per operator the last stage with which all its readers have an allowed stage; these stages are a valid cut."""
    graph = operators.graph
    readers: dict[str, list[str]] = {node.name: [] for node in graph.nodes}
    for edge in graph.edges:
        readers[edge.src].append(edge.dst)
    latest: dict[str, int] = {}
    for node in reversed(graph.nodes):
        reader = min(readers[node.name], key=lambda name: latest[name], default=None)
        limit = allowed[node.name][-1] if reader is None else latest[reader]
        possible = [stage for stage in allowed[node.name] if stage <= limit]
        if not possible:
            assert reader is not None
            while allowed[reader][-1] > latest[reader]:  # the operator that limits it
                reader = min(readers[reader], key=lambda each: latest[each])
            raise RequestError(
                f"{_line(operators, reader)}for this batch '{node.name}' runs in stage {allowed[node.name][0]}, where "
                f"its parameters are, and '{reader}', which depends on it, in stage {limit} at the latest: tensors are "
                "only sent to later stages; give an example batch and Python values with which the step uses what it "
                "uses now, register a parameter that it did not use between the modules around it, or build another "
                "pipeline"
            )
        latest[node.name] = possible[-1]
    return latest


def _line(operators: Operators, name: str) -> str:
    """The user's line of an operator, to begin a message; empty if it has none."""
    found = (line_of(operators.nodes[member]) for member in operators.members[name])
    return message_start(next(filter(None, found), ""))


def _sources(graph: OpGraph) -> dict[str, set[str]]:
    sources: dict[str, set[str]] = {node.name: set() for node in graph.nodes}
    for edge in graph.edges:
        sources[edge.dst].add(edge.src)
    return sources


def _known(cut: Cut, operators: Operators) -> dict[str, int]:
    """The stage of every node that is also in an operator of the planned capture."""
    calls = _calls(operators)
    pairs = aligned([identity for identity, _ in cut.nodes], [_identity(node) for node in calls])
    found = ((calls[new].name, cut.nodes[old][1]) for old, new in pairs)
    return {name: stage for name, stage in found if stage is not None}


def _preferred(operators: Operators, known: Mapping[str, int]) -> list[int]:
    """The stage of each operator by rule 2."""
    preferred: list[int | None] = []
    for members in operators.members.values():
        heads = sorted(members, key=lambda name: not computes(operators.nodes[name]))
        before = preferred[-1] if preferred else None
        preferred.append(next((known[name] for name in heads if name in known), before))
    first = next((stage for stage in preferred if stage is not None), 0)
    return [first if stage is None else stage for stage in preferred]
