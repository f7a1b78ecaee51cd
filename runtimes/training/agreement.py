"""Checks before planning that all ranks have the same arguments, model and values, and captured the same step.

A rank with other ones would run a part of another model, or wait for messages that are never sent. (Batches are
compared in `batch_agreement`.) Steps are compared operator by operator, and the error has the user's line: a step that
takes another path on one rank, such as ``if rank == 0``, or reads another number there, has other operators or
constants on that rank. Stages of different steps would train a mixture. Replicas have the same operators, and may have
other numbers, which their batches may contain.

Values are compared by fingerprints of all parameters and buffers. Each stage gets its parameters from its own rank's
model. If ranks had initialised them with different random numbers, they would train a mixture of models: that is
refused before the first step, unless a checkpoint of training, which overwrites them, was loaded. All values are read,
at 2.5 GB/s on one core: 0.2 s for the 500 MB of GPT-2. Samples of the values would not detect an older copy of a
checkpoint on one rank.
"""

from collections.abc import Mapping
from hashlib import sha256
from itertools import zip_longest
from typing import Any

import torch
from attrs import define, field
from torch import fx, nn
from torch.utils import _pytree as pytree

from ...core.capture.export.operators import Operators
from ...core.capture.graph.outputs import parts_in_words
from ...core.capture.values.user_lines import line_of
from ...core.errors import RequestError
from ...core.wording import shape_text
from ..batch.batch_agreement import fingerprint
from ..launch.team import Team
from ..weights import Weights, places, tensor_at


def check_same(team: Team, given: Mapping[str, Any]) -> None:
    """Refuse ranks with different arguments. All processes call this together.

    Args:
        given: the values to compare, by their names in messages; they are compared as strings.

    Raises:
        RequestError: on all ranks, with the first difference.
    """
    if in_one_process(team):
        return
    mine = {name: str(value) for name, value in given.items()}
    digest = sha256(repr(mine).encode()).hexdigest()
    if len(set(team.everywhere(lambda _: digest))) == 1:
        return
    found = team.everywhere(lambda _: mine)
    first = found[0]
    for number, other in enumerate(found):
        name = next((name for name in (*first, *other) if first.get(name) != other.get(name)), None)
        if name is not None:
            raise RequestError(
                f"rank {team.rank(number)} has {_text(name, other)} and rank {team.rank(0)} has {_text(name, first)}: "
                "every rank must call panpipe.pipeline with the same model and arguments; give all of them the same"
            )


def _text(name: str, given: Mapping[str, str]) -> str:
    return f"{name}={given[name]}" if name in given else f"no {name}"


def model_in_words(model: nn.Module, operators: Operators) -> dict[str, str]:
    """A model and its step as strings, for `check_same`.

    Returns:
        Its modules' modes, its parameters, and last what the step returns.
    """
    modes = {f"{name}.training" if name else "model.training": str(m.training) for name, m in model.named_modules()}
    parameters = {
        name: f"{shape_text(p.shape)} {p.dtype}{'' if p.requires_grad else ', frozen'}"
        for name, p in model.named_parameters()
    }
    returned = parts_in_words(operators.step.outputs)
    return {**parameters, **modes, "a step that returns": returned}


def in_one_process(team: Team) -> bool:
    """Whether all devices of all replicas are in this process, so that there is nothing to compare."""
    return len(team.local) == team.size and team.replicas == 1


Called = tuple[str, tuple[str, ...]]
"""An operator, and its arguments other than tensors."""


def check_same_step(team: Team, operators: Operators) -> None:
    """Refuse ranks whose captured steps differ. All processes call this together, after `check_same`.

    Raises:
        RequestError: on all ranks, with the first operator that differs and its lines.
    """
    if in_one_process(team):
        return
    calls = [node for node in operators.step.graph.nodes if node.op == "call_function"]
    mine = [_called(node) for node in calls]
    same = (operators.graph.hash, [name for name, _ in mine]), mine
    identities = team.everywhere(lambda _: [sha256(repr(part).encode()).hexdigest() for part in same])
    others = [
        (number, first, part)
        for number, identity in enumerate(identities)
        for part, first in enumerate((0, number - number % team.size))
        if identity[part] != identities[first][part]
    ]
    if not others:
        return
    found = team.everywhere(lambda _: [(*called, line_of(node)) for called, node in zip(mine, calls, strict=True)])
    for number, first, part in others:
        for theirs, known in zip_longest(found[number], found[first]):
            if theirs is None or known is None or theirs[: part + 1] != known[: part + 1]:
                raise RequestError(
                    f"rank {team.rank(number)} {_in_words(theirs)} where rank {team.rank(first)} {_in_words(known)}: "
                    "all ranks of a pipeline must run the same step with the same numbers; take what depends on the "
                    "rank out of it, and print or log what pipe.step returns and pipe.metrics instead"
                )
    raise RequestError(
        "ranks captured steps with the same operators for tensors of other shapes or parameters: every rank must call "
        "panpipe.pipeline with the same model, step and example batch"
    )


def _called(node: fx.Node) -> Called:
    """An operator of torch with its numbers; of others the name alone, because theirs may differ between processes."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
        return getattr(node.target, "__name__", "a function"), ()
    plain = (leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if not isinstance(leaf, fx.Node))
    return str(node.target), tuple(map(repr, plain))


def _in_words(row: tuple[str, tuple[str, ...], str] | None) -> str:
    """What a rank runs, in words."""
    if row is None:
        return "ends its step"
    name, plain, line = row
    numbers = f"({', '.join(plain)})" if plain else ""
    return f"runs {name}{numbers}{f' at {line}' if line else ''}"


_RULE = (
    "all ranks must start with the same model; call torch.manual_seed with the same seed on every rank before it is "
    "built, load the same checkpoint into it, or give Run(weights=)"
)


@define
class InitialWeights:
    """The differences between the ranks' models, until a checkpoint overwrites them; the same on all ranks.

    Args:
        loadable: in words, each parameter or buffer with other values that a checkpoint of training has.
        others: each one that it does not have.
    """

    loadable: list[str] = field(factory=list)
    others: list[str] = field(factory=list)

    def forget_overwritten(self) -> None:
        """Forget the differences in tensors that a checkpoint of training has; called when one was loaded."""
        self.loadable = []

    @property
    def warning(self) -> str | None:
        """The warning for the user; None if the ranks have the same model."""
        if not (self.loadable or self.others):
            return None
        return (
            f"{self._found}: call torch.manual_seed with the same number on all ranks before the model is built, or "
            "resume from a checkpoint before the first step"
        )

    def refuse_different(self) -> None:
        """Refuse to compute with models that differ.

        Raises:
            RequestError: on all ranks alike, with the first parameter or buffer that differs.
        """
        if self.loadable or self.others:
            resume = "" if self.others else ", or call resume() before the first step"
            raise RequestError(f"{self._found}: {_RULE}{resume}")

    @property
    def _found(self) -> str:
        first, *more = [*self.loadable, *self.others]
        return f"{first}, and so have {len(more)} more" if more else first


def compare_initial_weights(team: Team, model: nn.Module, weights: Weights) -> InitialWeights:
    """Compare the values of the ranks' models. All processes call this together.

    The ranks of the first replica are compared: other replicas copy their values. Ranks that share stages are
    all compared, in parts of parameters with those of the same parts.

    Args:
        weights: the source of values; tensors that it overwrites are not compared.
    """
    if len(team.local) == team.size:
        return InitialWeights()
    held = places(model)
    mine: dict[str, int | None] = {}
    for name, (place, *_) in held.items():
        if not weights.overwrites(name):
            tensor = tensor_at(place)
            mine[name] = None if tensor.is_meta else int(fingerprint([tensor]))
    split, parts_of_each = team.tensors.split, team.tensors.size
    compared = team.mesh.ranks if team.tensors.divided else team.size
    whole, parts = {n: v for n, v in mine.items() if n not in split}, {n: v for n, v in mine.items() if n in split}
    # By number of a device: the first device with the same parts.
    first_alike = [number // team.size % parts_of_each * team.size for number in range(compared)]
    digest = " ".join(sha256(repr(each).encode()).hexdigest() for each in (whole, parts))
    found = [other.partition(" ") for other in team.everywhere(lambda _: digest)[:compared]]
    if all(one[0] == found[0][0] and one[2] == found[first_alike[n]][2] for n, one in enumerate(found)):
        return InitialWeights()
    each = team.everywhere(lambda _: mine)[:compared]
    first = each[0]
    different = InitialWeights()
    for name, value in first.items():
        like = {n: first_alike[n] if name in split else 0 for n in range(compared)}
        number = next((n for n, other in enumerate(each) if other.get(name, -1) != each[like[n]].get(name, -2)), None)
        if number is None:
            continue
        ranks = team.rank(number), team.rank(like[number])
        if (each[number].get(name) is None) == (value is None):
            what = f"'{name}' has other values on rank {ranks[0]} than on rank {ranks[1]}"
        else:
            real, meta = ranks if value is None else ranks[::-1]
            what = f"'{name}' has values on rank {real} and is on meta on rank {meta}"
        persistent = any(place.persistent for place in held[name])
        (different.loadable if persistent else different.others).append(what)
    return different
