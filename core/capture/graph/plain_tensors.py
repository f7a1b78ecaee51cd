"""Tensors that are attributes of modules and no buffers, and that a step writes: they become buffers.

What a captured step writes has to be a tensor that one stage holds, whatever the shape of the microbatch; a constant of
a captured graph belongs to that graph alone. Such a buffer is not persistent, so that ``state_dict`` stays as it was.
"""

from collections.abc import Mapping

from torch import Tensor, fx, nn

from ...errors import RequestError
from ..python.reached import Reached
from ..values.user_lines import line_of
from .nodes import root_of, written_arguments


def make_buffer(model: nn.Module, tensor: Tensor) -> bool:
    """Make a tensor that is an attribute of modules their buffer, wherever it is one.

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
    """Stop where a graph writes a captured constant.

    Args:
        graph: captured.
        constants: name of a placeholder → the constant.

    Raises:
        WritesConstant: with the first one.
    """
    for node in graph.nodes:
        for name in (root_of(argument).name for argument in written_arguments(node)):
            if name in constants:
                raise WritesConstant(constants[name], line_of(node))


def make_constant_a_buffer(model: nn.Module, written: WritesConstant, reached: Reached) -> None:
    """Make a constant that a step writes a buffer of the module that has it as an attribute.

    Raises:
        RequestError: no module has it.
    """
    where = written.constant.untyped_storage().data_ptr()
    for module in model.modules():
        for value in module.__dict__.values():
            if isinstance(value, Tensor) and not value.is_meta and value.untyped_storage().data_ptr() == where:
                make_buffer(model, value)
                return
    line = written.line or reached.line_of(reached.place_of(written.constant))
    raise RequestError(
        f"{line}: the step writes a tensor {tuple(written.constant.shape)} in place that is no attribute of a module: "
        "each captured graph would have one of its own; register it with register_buffer"
    )
