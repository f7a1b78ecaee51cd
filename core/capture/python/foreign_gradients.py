"""Refuses trained tensors outside of the model, such as a criterion's parameters: a pipeline gives them no gradient."""

import gc
from collections.abc import Mapping

from torch import Tensor, fx
from torch.optim import Optimizer

from ...errors import RequestError
from ..values.user_lines import warn_at
from .guards import Guards

_FIX = "make it a parameter of the model, or the module that has it a submodule of the model"


def check_foreign_gradients(guards: Guards, graph: fx.Graph, loss: str, constants: Mapping[str, Tensor]) -> None:
    """Refuse tensors outside of the model that the step would give a gradient and an optimizer has; warn of others.

    Args:
        guards: the values that the step's code names.
        graph: the captured graph.
        loss: name of its node in the graph.
        constants: name of a placeholder → the constant, which shares the memory of what the step reads.

    Raises:
        RequestError: there is one; the message has its place and the line.
    """
    trained = guards.found.trained if constants else []
    if not trained:
        return
    differentiated = _differentiated(next(node for node in graph.nodes if node.name == loss))
    memory = {constants[n.name].untyped_storage().data_ptr() for n in differentiated if n.name in constants}
    found = [(place, tensor) for place, tensor in trained if tensor.untyped_storage().data_ptr() in memory]
    if not found:
        return
    optimized = _optimized()
    for place, tensor in found:
        line = guards.line_of(place.rpartition(".")[2])
        what = f"'{place}', which requires a gradient and is no parameter of the model: a pipeline gives it none"
        if id(tensor) in optimized:
            raise RequestError(f"{line}: the step reads {what}, and an optimizer has it; {_FIX}")
        warn_at(
            guards.line_of(place.rpartition(".")[2]),
            f"the step reads {what}; {_FIX}, or set its requires_grad to False",
        )


def _optimized() -> set[int]:
    """Identities of the tensors in all optimizers of the process."""
    optimizers = [found for found in gc.get_objects() if issubclass(type(found), Optimizer)]
    return {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}


def _differentiated(loss: fx.Node) -> set[fx.Node]:
    """The nodes to which a loss's gradient flows."""
    seen, waiting = {loss}, [loss]
    while waiting:
        node = waiting.pop()
        modes = node.meta.get("modes")
        if getattr(node.target, "_opname", "") not in ("detach", "detach_") and (modes is None or modes.grad):
            waiting += [source for source in node.all_input_nodes if source not in seen]
            seen.update(node.all_input_nodes)
    return seen
