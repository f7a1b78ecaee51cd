"""The stages of parameters and buffers that the example's step does not use, so that a later step may use them.

A step may choose a part of the model by the batch or by a Python value, such as the head of a task; then the example
uses one of several heads. A part that it does not use is placed where a step that uses it can probably run: tensors are
only sent to later stages, and parts of a model usually run in the order of their definition::

    heads.a  used, stage 1 ──▶ heads.b  unused: stage 1        (the part next to it in the same module)
    body     used, stage 0 ──▶ head     unused: stage 0        (else the last one before it)
"""

from bisect import bisect_left
from collections.abc import Iterator

from torch import nn

from ...core.capture.export.captured_step import CapturedStep
from ...core.capture.export.carry_over import Cut
from ..weights.remote_tensors import RemoteTensor


def stages_of_unused(model: nn.Module, step: CapturedStep, cut: Cut) -> dict[str, int]:
    """The stage of each parameter that the step does not use, and of each unused buffer of a module with only such.

    All ranks get the same result. Parameters on meta have no stage, because nothing sets their values.

    Args:
        model: the user's module.
        step: the captured step.
        cut: of that step, into stages.

    Returns:
        Name → stage, for parameters and then buffers.
    """
    used: dict[str, int] = {}
    for index, names in enumerate(cut.parameters):
        for name in names:
            used.setdefault(name, index)
    order = [name for name, _ in model.named_parameters()]
    near = _Neighbours(order, used)
    found = {
        name: near.stage(number, name)
        for number, (name, parameter) in enumerate(model.named_parameters())
        if name not in used and (not parameter.is_meta or isinstance(parameter, RemoteTensor))
    }
    read = {step.buffers[node.name] for node in step.graph.nodes if node.name in step.buffers and node.users}
    for path, module in model.named_modules():
        start = f"{path}." if path else ""
        own = [start + leaf for leaf, _ in module.named_parameters(recurse=False)]
        if own and all(name in found for name in own):
            buffers = [start + leaf for leaf, _ in module.named_buffers(recurse=False)]
            found |= {name: found[own[0]] for name in buffers if name not in read}
    return found


class _Neighbours:
    """The used parameters in each module, at any depth.

    Args:
        order: names of all parameters, in the model's order.
        used: parameter → its first stage.
    """

    def __init__(self, order: list[str], used: dict[str, int]) -> None:
        self._inside: dict[str, tuple[list[int], list[int]]] = {}
        for number, name in enumerate(order):
            if name in used:
                for module in _modules_of(name):
                    places, stages = self._inside.setdefault(module, ([], []))
                    places.append(number)
                    stages.append(used[name])

    def stage(self, number: int, name: str) -> int:
        """The stage of an unused parameter: that of the last used one before it, or else of the first one after it, in
        the innermost module that has any.

        Args:
            number: its place in the model's order.
            name: its name.
        """
        inside = next((found for module in _modules_of(name) if (found := self._inside.get(module))), None)
        if inside is None:
            return 0
        places, stages = inside
        return stages[max(bisect_left(places, number) - 1, 0)]


def _modules_of(name: str) -> Iterator[str]:
    """The paths of the modules that contain a parameter, the innermost first; the model's is empty."""
    while name:
        name = name.rpartition(".")[0]
        yield name
