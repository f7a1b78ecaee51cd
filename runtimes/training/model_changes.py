"""Changes of a model between steps: parameters that are frozen or unfrozen, buffers that are assigned.

The stages hold the user's own tensors. A frozen parameter gets no gradient, so that its optimizer skips it, as in one
process; an unfrozen one is added to its stage's optimizer. A replaced parameter is refused: also in one process, the
optimizer would still update the old one.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from ...core.errors import RequestError
from ...core.plan.plan import Plan
from ..update.stage_state import StageState
from ..weights import places, tensor_at


class KnownTensors:
    """The parameters and buffers of a model, to detect changes."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._dtypes = {name: parameter.dtype for name, parameter in self._parameters.items()}
        self._buffers = {
            name: (place.module, place.leaf, tensor)
            for name, held in places(model).items()
            for place in held
            if not isinstance(tensor := tensor_at(place), nn.Parameter)
        }

    def refuse_replaced_parameters(self, model: nn.Module, when: str) -> None:
        """Refuse a model whose parameters are not those that the stages hold.

        A removed or a new parameter alone is accepted: a step that reads a new one is refused when it is captured.

        Args:
            when: the time of the change for messages, such as "between steps 2 and 3".

        Raises:
            RequestError: with the name of a replaced parameter.
        """
        now = dict(model.named_parameters(remove_duplicate=False))
        known = self._parameters
        gone, new = [name for name in known if name not in now], [name for name in now if name not in known]
        replaced = [name for name in known if name in now and now[name] is not known[name]] or (gone if new else [])
        if replaced:
            were, others = ("was", "another one") if len(replaced) == 1 else ("were", "other ones")
            by = _named(new) if replaced is gone else others
            raise RequestError(
                f"{when} {_named(replaced)} {were} replaced by {by}: stages and their optimizers hold the parameters "
                "of the beginning; write into them under torch.no_grad() with .copy_() (load_state_dict without "
                f"assign=True does), exchange modules and register parametrizations before that, or {_ANEW}"
            )
        for name, parameter in known.items():
            if parameter.dtype != self._dtypes[name]:
                raise RequestError(
                    f"{when} parameter '{name}' became {parameter.dtype} and was {self._dtypes[name]}: stages are "
                    f"captured for the dtypes of the beginning; convert the model before that, or {_ANEW}"
                )

    def write_back_buffers(self, when: str) -> bool:
        """Copy assigned buffers into the tensors that the stages hold, and put those back into the model.

        Returns:
            Whether a buffer was assigned.

        Raises:
            RequestError: a buffer has another shape or dtype than before.
        """
        found = False
        for name, (module, leaf, known) in self._buffers.items():
            now = module._buffers.get(leaf)
            if now is known or now is None:
                continue
            if (now.shape, now.dtype) != (known.shape, known.dtype):
                raise RequestError(
                    f"{when} buffer '{name}' was assigned {now.dtype} {tuple(now.shape)} and was {known.dtype} "
                    f"{tuple(known.shape)}: a buffer keeps its shape and dtype; allocate it large enough"
                )
            if not known.is_meta:
                known.copy_(now.detach())  # the stages' tensor gets no gradient function
            module._buffers[leaf] = known
            found = True
        return found


_ANEW = "build another pipeline after it"


def _named(names: Sequence[str]) -> str:
    """Parameters in words, for messages."""
    first, more = names[0], len(names) - 1
    return f"parameter '{first}'" + (f" and {more} more" if more else "")


class TiedCopies:
    """Copies of tied weights that several stages of this process hold; keeps them equal to the user's parameter.

    Args:
        parameters: stage → name → parameter; the first stage's is the user's own.
    """

    def __init__(self, parameters: Mapping[int, Mapping[str, nn.Parameter]]) -> None:
        held: dict[str, list[nn.Parameter]] = {}
        for _, own in sorted(parameters.items()):
            for name, parameter in own.items():
                held.setdefault(name, []).append(parameter)
        self._held = [same for same in held.values() if len(same) > 1]
        self.note()

    def note(self) -> None:
        """Record that all copies are equal now."""
        self._states = [_state(first) for first, *_ in self._held]

    def follow(self) -> None:
        """Copy the user's parameters that were written since the copies were equal."""
        for (first, *others), state in zip(self._held, self._states, strict=True):
            if _state(first) != state:
                with torch.no_grad():
                    for other in others:
                        other.copy_(first)
        if self._held:
            self.note()


def _state(parameter: nn.Parameter) -> tuple[int, int]:
    return parameter._version, parameter.data_ptr()


def refuse_strays(model: nn.Module, states: Mapping[int, StageState]) -> None:
    """Refuse an optimizer to which the user added a tensor of another stage, because that other stage computes its
    gradient.

    Raises:
        RequestError: with the name of the parameter, if it is one of the model's.
    """
    for index, state in states.items():
        stray = state.stray()
        if stray is None:
            continue
        name = next((name for name, p in model.named_parameters() if p is stray), None)
        what = f"a tensor of shape {tuple(stray.shape)}" if name is None else f"parameter '{name}'"
        raise RequestError(
            f"{what} was added to the optimizer of stage {index}, which has {_named(sorted(state.parameters)[:3])}: an "
            "unfrozen parameter is added to the optimizer of its own stage automatically, to the group that optimizer= "
            f"chooses; remove it from this one, or {_ANEW}"
        )


def follow_trained(model: nn.Module, plan: Plan, states: Mapping[int, StageState], whole_update: bool) -> bool:
    """Freeze and unfreeze the parameters of stages like the model's.

    Args:
        whole_update: whether the update needs all stages at once, for a global norm or a scaler.

    Returns:
        Whether an unfrozen parameter was added to an optimizer; its gradient has no memory yet.

    Raises:
        RequestError: a parameter was unfrozen and cannot be added.
    """
    tied = {weight.name for weight in plan.tied}
    held = Counter(name for stage in plan.stages for name in stage.parameters)
    now = dict(model.named_parameters())
    joined = False
    for state in states.values():
        for name, parameter in state.parameters.items():
            wanted = now[name].requires_grad if name in now else parameter.requires_grad
            if parameter.requires_grad is not wanted:
                parameter.requires_grad_(wanted)
            if not wanted or state.trains(name):
                continue
            reason = (
                "several stages read it, and the plan sums no gradients for it" if held[name] > 1 and name not in tied
                else "clip_norm= or scaler= was set up without it" if whole_update else None
            )  # fmt: skip
            if reason is not None:
                raise RequestError(
                    f"parameter '{name}' was unfrozen and {reason}: build the pipeline with all parameters that are "
                    "ever trained unfrozen, and freeze them after that"
                )
            state.join(name)
            joined = True
    return joined
