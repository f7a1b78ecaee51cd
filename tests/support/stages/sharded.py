"""A stage whose optimizer replicas share, on threads over the transport of one process, and one optimizer alone."""

from concurrent.futures import ThreadPoolExecutor

import torch
from panpipe.backends.memcpy import connect
from panpipe.runtimes.update.buckets import Sharing
from panpipe.runtimes.update.stage_state import StageState
from torch import nn

SHAPES = {"w": (3, 5), "scalar": (), "b": (7,), "empty": (0, 4), "conv": (2, 3, 2, 2), "tied": (4, 3)}


def model(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    found = {n: nn.Parameter(torch.randn(shape, dtype=dtype, generator=generator)) for n, shape in SHAPES.items()}
    with torch.no_grad():
        found["conv"].data = found["conv"].data.to(memory_format=torch.channels_last)
    return found


def gradient(name, replica, step, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1000 * step + 10 * replica + list(SHAPES).index(name))
    return torch.randn(SHAPES[name], dtype=dtype, generator=generator)


def on_each(count, work):
    ends = connect(count)
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, ends))


def states(end, count, make, dtype=torch.float64):
    sharing = Sharing(lambda: end, end.device, count, frozenset({"tied"}))
    return StageState(model(dtype), {}, make, True, torch.device("cpu"), sharing=sharing)


def adamw(named):
    return torch.optim.AdamW(named, lr=0.1, amsgrad=True)


def eager(named):
    return torch.optim.Adagrad([p for _, p in named], lr=0.1, initial_accumulator_value=0.5)


def train(state, end, steps=2):
    for step in range(steps):
        for name, parameter in state.parameters.items():
            buffer = state.gradient_buffer(parameter)
            assert buffer.stride() == parameter.stride()
            parameter.grad = buffer.copy_(gradient(name, end.device, step, parameter.dtype))
        state.reduce_gradients(end).wait()
        state.step()
        state.gather(end).wait()


def alone(count, make, dtype=torch.float64, steps=2):
    parameters = model(dtype)
    optimizer = make(list(parameters.items()))
    for step in range(steps):
        for name, parameter in parameters.items():
            parameter.grad = sum(gradient(name, replica, step, dtype) for replica in range(count))
        optimizer.step()
    return parameters, optimizer
