"""Recurrent layers as one operator each: otherwise a trace has the operators of every time, for one length alone.

While a step is captured, a layer of `torch.nn.LSTM`, `GRU` or `RNN` is an operator of this module, with dropout between
layers, so that each layer may be in another stage. The operator runs torch's own kernel. Its backward runs the forward
a second time with autograd, so that nothing but its inputs is held in between. Under autocast, and for packed
sequences, a trace has torch's operators.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from .autograd_functions import autograd_in_kernel

_STATES = {"lstm": 2, "gru": 1, "rnn_tanh": 1, "rnn_relu": 1}
"""Recurrent functions of torch, and the number of states that they carry from one time to the next.

All take (input, states, weights, has_biases, layers, dropout, train, bidirectional, batch_first)."""
_library = torch.library.Library("panpipe", "FRAGMENT")


@contextmanager
def recurrence_as_operators() -> Iterator[None]:
    """Within this context recurrent layers call the operators of this module."""
    with ExitStack() as stack:
        for name, states in _STATES.items():
            original = getattr(torch._VF, name)
            stack.enter_context(mock.patch.object(torch._VF, name, _layers(name, states, original)))
        yield


def _layers(name: str, count: int, original: Callable[..., Any]) -> Callable[..., Any]:
    """A recurrent function that runs one layer after another."""
    operator = getattr(torch.ops.panpipe, name)

    def run(x: Tensor, states: Any, weights: Any, *options: Any) -> Any:
        if isinstance(weights, Tensor):  # a packed sequence
            return original(x, states, weights, *options)
        biases, layers, dropout, train, bidirectional, batch_first = options
        carried = list(states) if count > 1 else [states]
        size, directions = len(weights) // layers, 2 if bidirectional else 1
        ends: list[list[Tensor]] = [[] for _ in carried]
        x = x.transpose(0, 1) if batch_first else x
        for layer in range(layers):
            given = [state.narrow(0, layer * directions, directions) for state in carried]
            own = weights[layer * size : (layer + 1) * size]
            if torch.is_autocast_enabled(x.device.type):
                found = original(x, given if count > 1 else given[0], own, biases, 1, 0.0, train, bidirectional, False)
            else:
                found = operator(x, given, own, biases, bidirectional)
            x, *last = found
            for end, state in zip(ends, last, strict=True):
                end.append(state)
            x = F.dropout(x, dropout, train) if dropout > 0 and layer < layers - 1 else x
        joined = [end[0] if layers == 1 else torch.cat(end) for end in ends]
        return (x.transpose(0, 1) if batch_first else x, *joined)

    return run


def _define(name: str, count: int) -> None:
    """Define the operator of a recurrent function, and its backward."""
    arguments = "Tensor x, Tensor[] states, Tensor[] weights, bool biases, bool bidirectional"
    _library.define(f"{name}({arguments}) -> Tensor[]")
    _library.define(f"{name}_backward(Tensor[] gradients, {arguments}, int[] wanted) -> Tensor[]")

    def call(x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], biases: bool, both: bool) -> list[Tensor]:
        function = getattr(torch._VF, name)
        return list(function(x, states if count > 1 else states[0], weights, biases, 1, 0.0, True, both, False))

    def forward(x: Tensor, states: list[Tensor], weights: list[Tensor], *options: bool) -> list[Tensor]:
        with autograd_in_kernel():  # oneDNN's kernels round otherwise without
            found = call(*_leaves(x, states, weights), *options)
        return [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in found]

    def backward(
        gradients: list[Tensor], x: Tensor, states: list[Tensor], weights: list[Tensor], biases: bool, both: bool,
        wanted: list[int],
    ) -> list[Tensor]:  # fmt: skip
        with autograd_in_kernel():
            given = _leaves(x, states, weights)
            found = call(*given, biases, both)
            leaves = [given[0], *given[1], *given[2]]
            flowed = torch.autograd.grad(found, [leaves[i] for i in wanted], gradients)
        return [gradient.clone(memory_format=torch.contiguous_format) for gradient in flowed]

    def fake(x: Tensor, states: list[Tensor], weights: list[Tensor], biases: bool, both: bool) -> list[Tensor]:
        out = x.new_empty((x.shape[0], x.shape[1], states[0].shape[-1] * (2 if both else 1)))
        return [out, *(x.new_empty(state.shape) for state in states)]

    def fake_backward(
        gradients: list[Tensor], x: Tensor, states: list[Tensor], weights: list[Tensor], biases: bool, both: bool,
        wanted: list[int],
    ) -> list[Tensor]:  # fmt: skip
        given = [x, *states, *weights]
        return [given[i].new_empty(given[i].shape) for i in wanted]

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, states, weights, *ctx.options = inputs
        ctx.counts = len(states), len(weights)
        ctx.save_for_backward(x, *states, *weights)

    def differentiate(ctx: Any, gradients: list[Tensor]) -> Any:
        x, *others = given = ctx.saved_tensors
        states, weights = others[: ctx.counts[0]], others[ctx.counts[0] :]
        wanted = [i for i, tensor in enumerate(given) if tensor.requires_grad]
        made = getattr(torch.ops.panpipe, f"{name}_backward")(gradients, x, states, weights, *ctx.options, wanted)
        found = dict(zip(wanted, made, strict=True))
        each = [found.get(i) for i in range(len(given))]
        return each[0], each[1 : 1 + ctx.counts[0]], each[1 + ctx.counts[0] :], None, None

    _library.impl(name, forward, "CompositeExplicitAutograd")
    _library.impl(f"{name}_backward", backward, "CompositeExplicitAutograd")
    torch.library.register_fake(f"panpipe::{name}", fake, lib=_library)
    torch.library.register_fake(f"panpipe::{name}_backward", fake_backward, lib=_library)
    torch.library.register_autograd(f"panpipe::{name}", differentiate, setup_context=save, lib=_library)

    @register_flop_formula(getattr(torch.ops.panpipe, name), get_raw=True)
    def flops(x: Tensor, states: Any, weights: Sequence[Tensor], *_: Any, **__: Any) -> int:
        return 2 * x.shape[0] * x.shape[1] * sum(weight.numel() for weight in weights if weight.dim() == 2)

    @register_flop_formula(getattr(torch.ops.panpipe, f"{name}_backward"), get_raw=True)
    def flops_of_backward(gradients: Any, *given: Any, **_: Any) -> int:
        return 3 * flops(*given)  # the forward again, and the gradients of both factors


def _leaves(x: Tensor, states: list[Tensor], weights: list[Tensor]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Detached tensors that require a gradient."""
    return _leaf(x), list(map(_leaf, states)), list(map(_leaf, weights))


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()


for _name, _count in _STATES.items():
    _define(_name, _count)
