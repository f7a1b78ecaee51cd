"""An optimizer and a scheduler as strings, by which ranks find that theirs differ; see `launch/agreement`.

The user's functions create them for small tensors with the names, dtypes and numbers of dimensions of the model's
parameters. Compared are their classes, the options of each parameter, and what a scheduler has in its state. Functions
among these, such as a scheduler's own formula, have no text that is equal on two ranks; they are not compared.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import RequestError
from .optimizers import MEMBERS, OptimizerFactory, SchedulerFactory


def describe_update(
    optimizer: OptimizerFactory | None,
    scheduler: SchedulerFactory | None,
    parameters: Iterable[tuple[str, nn.Parameter]],
) -> dict[str, str]:
    """The optimizer and the scheduler of a model's trained parameters.

    Args:
        optimizer, scheduler: create them; None for none.
        parameters: (name, parameter) of the model; they may be on meta.

    Returns:
        What each option is of → its value. Nothing more than ``"an optimizer"`` if one of the functions fails: the
        pipeline's own optimizers raise the error.

    Raises:
        RequestError: the function of the optimizer returns nothing for all of them.
    """
    found = {"an optimizer": str(optimizer is not None), "a scheduler": str(scheduler is not None)}
    if optimizer is None:
        return found
    stand_ins = {
        name: nn.Parameter(torch.zeros([min(size, 2) for size in p.shape], dtype=p.dtype))
        for name, p in parameters
        if p.requires_grad
    }
    if not stand_ins:
        return found
    name_of = {id(p): name for name, p in stand_ins.items()}
    try:
        with torch.random.fork_rng([]):
            made = optimizer(list(stand_ins.items()))
            if made is None:
                raise RequestError(
                    f"optimizer returned None for all {len(stand_ins)} trained parameters of the model: return the "
                    "optimizer, as in lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)"
                )
            planned = None if scheduler is None else scheduler(made)
            found["optimizer"] = type(made).__name__
            for group in made.param_groups:
                options = dict(_texts({key: value for key, value in group.items() if key not in MEMBERS}))
                for parameter in group["params"]:
                    name = name_of.get(id(parameter))
                    found |= {f"{key} of '{name}'": text for key, text in options.items() if name is not None}
            if planned is not None:
                found["scheduler"] = type(planned).__name__
                found |= {f"scheduler's {key}": text for key, text in _texts(planned.state_dict())}
    except RequestError:
        raise
    except Exception:
        return {"an optimizer": "True"}
    return found


def _texts(values: Mapping[Any, Any]) -> Iterator[tuple[str, str]]:
    """The values that have the same text in every process, by their keys; those of dicts inside by joined keys."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{inner}", text) for inner, text in _texts(value))
        elif isinstance(value, list | tuple) and any(isinstance(each, Mapping) for each in value):
            yield from ((f"{key}.{inner}", text) for inner, text in _texts(dict(enumerate(value))))
        elif _is_plain(value):
            yield str(key), repr(value.tolist() if isinstance(value, Tensor) else value)


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | complex | str | Tensor)
