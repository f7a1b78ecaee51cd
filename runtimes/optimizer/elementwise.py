"""Whether an optimizer updates each element of a parameter independently, so that each replica may update a part.

This is tested: the optimizer steps small whole parameters, and slices of them as replicas would hold them. Adam, SGD,
RMSprop and the like are elementwise. Not elementwise are updates with a factor of norms of the parameter (LAMB, LARS),
with statistics of rows and columns (Adafactor, Shampoo, SOAP), with an orthogonal matrix (Muon), or with noise that is
drawn.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ...backends.contract import Backend
from ...core.errors import RequestError, in_a_line
from .optimizers import OptimizerFactory
from .sharing.sharded_buckets import Sharing
from .sharing.shards import Shards
from .trials import STEPS, Shape, TrialParameters, spread, trial_shapes

_SAME = 1e-9
"""Largest relative difference in norm of two updates, in float64, that counts as rounding."""
_SMALL, _LARGE = 5, 512
"""Largest size of a dimension in the trials: small for every kind of parameter, and large for the largest ones, because
some optimizers treat large matrices differently."""
_FEW, _LARGEST = 64, 2
"""Parameters of a stage that are tried small, and of all stages that are tried large."""
_REPLICAS = 3


def _no_transport() -> Backend:
    """The transport of a trial, which moves nothing: only reductions and gathers ask for it."""
    raise AssertionError("a trial of an optimizer moves no tensors")


def check_elementwise(make: OptimizerFactory, stages: Sequence[Mapping[str, nn.Parameter]]) -> None:
    """Refuse an optimizer that updates slices of a parameter differently than the whole parameter.

    Optimizers that cannot be tried on whole parameters are accepted: the real one will raise the error.

    Args:
        make: the user's.
        stages: the trained parameters of each stage, by name; on meta or not.

    Raises:
        RequestError: the updates differ, or slices cannot be stepped.
    """
    every = {name: p for stage in stages for name, p in stage.items()}
    large = sorted(every, key=lambda name: -every[name].numel())[:_LARGEST]
    trials = [
        trial_shapes({name: stage[name] for name in spread(list(stage), _FEW)}, _SMALL) for stage in stages if stage
    ]
    trials += [
        trial_shapes({name: every[name]}, _LARGE) for name in large if max(every[name].shape, default=0) > _SMALL
    ]
    for shapes in trials:
        _try(make, shapes)


def _try(make: OptimizerFactory, shapes: Mapping[str, Shape]) -> None:
    with torch.random.fork_rng([]):
        try:
            whole = _updated(make, shapes, None)
        except Exception:
            return  # the real optimizer will raise the error
        if whole is None:
            return
        kind, values = whole
        sliced: dict[str, list[Tensor]] = {name: [] for name in shapes}
        for replica in range(_REPLICAS):
            try:
                found = _updated(make, shapes, Sharing(_no_transport, replica, _REPLICAS))
            except Exception as failure:
                raise RequestError(
                    f"{kind} cannot step a part of a parameter ({in_a_line(failure)}): {_REFUSED}"
                ) from failure
            for name, value in ({} if found is None else found[1]).items():
                sliced[name].append(value)
    for name, value in values.items():
        together = torch.cat(sliced[name]) if sliced[name] else value
        if together.shape != value.shape or bool((together - value).norm() > _SAME * value.norm()):
            raise RequestError(
                f"{kind} updates '{name}' differently if each replica steps a part of it: its update of an element "
                f"depends on others; {_REFUSED}"
            )


_REFUSED = "shard= needs an elementwise optimizer, such as torch.optim.AdamW or SGD; use one, or give shard='none'"


def _updated(
    make: OptimizerFactory, shapes: Mapping[str, Shape], sharing: Sharing | None
) -> tuple[str, dict[str, Tensor]] | None:
    """The optimizer's name, and the changes that it makes in some steps, in one dimension; None without an optimizer.

    Args:
        make: creates it.
        shapes: of the parameters, by name.
        sharing: whose slices are stepped; None for whole parameters.
    """
    torch.manual_seed(0)
    trial = TrialParameters(shapes)
    parameters = trial.parameters
    made = make(list(parameters.items()))
    if made is None:
        return None
    shards = None
    if sharing is not None:
        shards = Shards(parameters, sharing)
        shards.narrow_optimizer(made)
    before = {name: p.detach().flatten().clone() for name, p in parameters.items()}
    for _ in range(STEPS):
        for name, parameter in parameters.items():
            gradient = trial.draw(name)
            if shards is None:
                parameter.grad = gradient
            elif name in shards.parts:
                part = shards.parts[name]
                part.value.grad = gradient.flatten()[part.start : part.stop].view(part.value.shape)
        made.step()
    changes = {name: p.detach().flatten() - before[name] for name, p in parameters.items()}
    if shards is not None:
        changes = {name: changes[name][part.start : part.stop] for name, part in shards.parts.items()}
    return type(made).__name__, changes
