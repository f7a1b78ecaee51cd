"""Refuses trained tensors outside of the model, such as a criterion's parameters: a pipeline gives them no gradient."""

import gc
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ...errors import RequestError
from ..values.nesting import tensors_of
from ..values.user_lines import warn_at
from .reached import Reached

_FIX = "make it a parameter of the model, or the module that has it a submodule of the model"


def with_gradients_from(result: Any) -> Iterator[Tensor]:
    """The leaf tensors to which a backward from a result gives a gradient.

    Args:
        result: of a step.
    """
    waiting = [tensor.grad_fn for tensor in tensors_of(result) if tensor.grad_fn is not None]
    seen = set(map(id, waiting))
    kept: list[Any] = list(waiting)  # alive, so that no other node gets its identity
    while waiting:
        node = waiting.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            yield variable
        for following, _ in node.next_functions:
            if following is not None and id(following) not in seen:
                seen.add(id(following))
                kept.append(following)
                waiting.append(following)


def check_foreign_gradients(reached: Reached, given: Iterable[Tensor]) -> None:
    """Refuse tensors outside of the model that the step would give a gradient and an optimizer has; warn of others.

    Args:
        reached: what the step reaches.
        given: the leaf tensors to which the step's backward would give a gradient.

    Raises:
        RequestError: there is one; the message has its place and the line.
    """
    mine = set(map(id, given))
    found = [(place, tensor) for place, tensor in reached.trained if id(tensor) in mine]
    if not found:
        return
    optimized = _optimized()
    for place, tensor in found:
        what = f"'{place}', which requires a gradient and is no parameter of the model: a pipeline gives it none"
        if id(tensor) in optimized:
            raise RequestError(f"{reached.line_of(place)}: the step reads {what}, and an optimizer has it; {_FIX}")
        warn_at(reached.line_of(place), f"the step reads {what}; {_FIX}, or set its requires_grad to False")


def _optimized() -> set[int]:
    """Identities of the tensors in all optimizers of the process."""
    optimizers = [found for found in gc.get_objects() if issubclass(type(found), Optimizer)]
    return {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
