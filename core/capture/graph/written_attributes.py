"""Tensors that a step writes and that are plain attributes of modules: they become buffers.

A tensor that a captured step writes must be held by one stage for microbatches of every shape; a constant of a captured
graph belongs to that graph alone. These buffers are not persistent, so that ``state_dict`` does not change.
"""

from collections.abc import Mapping

from torch import Tensor, fx, nn

from ...errors import RequestError
from ..values.user_lines import line_of
from .nodes import root_of, written_arguments


def make_buffer(model: nn.Module, tensor: Tensor) -> bool:
    """Register a tensor that is an attribute of modules as their buffer.

    Args:
        model: the user's module.
        tensor: the attribute's value.

    Returns:
        Whether it was an attribute of a module.
    """
    found = False
    for module in model.modules():
        for key in [key for key, value in module.__dict__.items() if value is tensor]:
            del module.__dict__[key]
            module.register_buffer(key, tensor, persistent=False)
            found = True
    return found


class WritesConstant(Exception):
    """A captured graph writes a constant in place.

    Args:
        constant: the tensor.
        line: of the user's, that writes it.
    """

    def __init__(self, constant: Tensor, line: str) -> None:
        super().__init__(line)
        self.constant, self.line = constant, line


def refuse_written_constants(graph: fx.Graph, constants: Mapping[str, Tensor]) -> None:
    """Refuse a graph that writes a captured constant.

    Args:
        graph: captured.
        constants: name of a placeholder → the constant.

    Raises:
        WritesConstant: for the first one.
    """
    for node in graph.nodes:
        for name in (root_of(argument).name for argument in written_arguments(node)):
            if name in constants:
                raise WritesConstant(constants[name], line_of(node))


def make_constant_a_buffer(model: nn.Module, written: WritesConstant) -> Tensor:
    """Register a constant that a step writes as a buffer of the module that has it as an attribute.

    Raises:
        RequestError: no module has it.
    """
    where = written.constant.untyped_storage().data_ptr()
    for module in model.modules():
        for value in module.__dict__.values():
            if isinstance(value, Tensor) and not value.is_meta and value.untyped_storage().data_ptr() == where:
                make_buffer(model, value)
                return value
    raise RequestError(
        f"{written.line or 'the step'}: the step writes a tensor {tuple(written.constant.shape)} in place that is not "
        "an attribute of a module: each captured graph would have its own copy; register it with register_buffer"
    )
