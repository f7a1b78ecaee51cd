"""Checks that the ranks of a pipeline start with the same model, by fingerprints of all parameters and buffers.

Each stage gets its parameters from its own rank's model. If ranks had initialised them with different random numbers,
they would train a mixture of models. All values are read, at 2.5 GB/s on one core: 0.2 s for the 500 MB of GPT-2.
Samples of the values would not detect an older copy of a checkpoint on one rank.
"""

from hashlib import sha256

from torch import nn

from ...core.errors import RequestError
from ..batch.fingerprint import fingerprint
from ..launch.team import Team
from ..weights import Weights, places, tensor_at

_RULE = (
    "ranks begin with one model; call torch.manual_seed with the same seed on every rank before it is built, load the "
    "same checkpoint into it, or give weights="
)


def check_same_weights(team: Team, model: nn.Module, weights: Weights) -> None:
    """Refuse ranks whose models have different values. All processes call this together.

    The ranks of the first replica are compared: other replicas copy their values.

    Args:
        team: the devices.
        model: the user's module.
        weights: the source of values; tensors that it overwrites are not compared.

    Raises:
        RequestError: on all ranks, with the first parameter or buffer that differs.
    """
    if len(team.local) == team.size:
        return
    mine: dict[str, int | None] = {}
    for name, held in places(model).items():
        if not weights.overwrites(name):
            tensor = tensor_at(held[0])
            mine[name] = None if tensor.is_meta else int(fingerprint([tensor]))
    digest = sha256(repr(mine).encode()).hexdigest()
    if len(set(team.everywhere(lambda _: digest)[: team.size])) == 1:
        return
    first, *others = team.everywhere(lambda _: mine)[: team.size]
    for number, other in enumerate(others, 1):
        apart = [name for name in first if other.get(name, -1) != first[name]]
        if apart:
            name, ranks = apart[0], (team.rank(number), team.rank(0))
            more = f", and so have {len(apart) - 1} more" if len(apart) > 1 else ""
            if (other.get(name) is None) == (first[name] is None):
                what = f"'{name}' has other values on rank {ranks[0]} than on rank {ranks[1]}{more}"
            else:
                real, meta = ranks if first[name] is None else ranks[::-1]
                what = f"'{name}' has values on rank {real} and is on meta on rank {meta}{more}"
            raise RequestError(f"{what}: {_RULE}")
