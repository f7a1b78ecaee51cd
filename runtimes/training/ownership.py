"""The parameters and buffers that each process holds: those of its stages, as the user's own tensors and names."""

from collections.abc import Mapping, Sequence

import torch
from attrs import frozen
from torch import Tensor, nn

from ...backends.contract import Handle
from ...core.capture.programs.stage_programs import StagePrograms
from ...core.plan.plan import Plan
from ..launch.team import Team
from ..update.stage_state import StageState
from ..weights import places, tensor_at
from ..weights.places import unallocated
from ..weights.remote_tensors import RemoteTensor, make_remote


@frozen
class OwnTensors:
    """The parameters and buffers of the stages in this process.

    Args:
        parameters: stage index → name → parameter.
        buffers: stage index → name → buffer; stages on one device share them.
        unallocated: name → tensor without memory yet, for each tensor that is on meta in the user's model.
        tied_copies: further copies without memory yet, of tied weights that several stages here hold.
        copies: (copy, original) of buffers that stages on several devices read and none writes.
    """

    parameters: dict[int, dict[str, nn.Parameter]]
    buffers: dict[int, dict[str, Tensor]]
    unallocated: dict[str, Tensor]
    tied_copies: tuple[nn.Parameter, ...]
    copies: tuple[tuple[Tensor, Tensor], ...] = ()

    @property
    def held(self) -> dict[str, Tensor]:
        """Each parameter and buffer once, by name; for a tied weight the copy of the first stage."""
        found: dict[str, Tensor] = {}
        for _, here in sorted(self.buffers.items()):
            for name, buffer in here.items():
                found.setdefault(name, buffer)
        for _, own in sorted(self.parameters.items()):
            for name, parameter in own.items():
                found.setdefault(name, parameter)
        return found

    @property
    def without_memory(self) -> list[Tensor]:
        """The tensors that are allocated when values are loaded."""
        return [*self.unallocated.values(), *self.tied_copies]

    def copy_buffers(self) -> None:
        """Copy the values of buffers to their copies."""
        for copy, original in self.copies:
            copy.copy_(original)


def own_tensors(
    model: nn.Module,
    programs: Mapping[int, StagePrograms],
    where: Mapping[int, torch.device],
    unused: Mapping[str, int] | None = None,
) -> OwnTensors:
    """The parameters and buffers of each local stage, on its device.

    The first local stage that reads a parameter gets the user's tensor, or if that is on meta an unallocated one that
    will replace it; other local stages get copies.

    Args:
        where: local stage → its torch device. Tensors on another device are moved as by ``Module.to``: the user's
            tensors stay the same objects.
        unused: the stage of each tensor that the example's step does not use.
    """
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    inputs = {i: (list(stage.inputs.parameters), list(stage.inputs.buffers)) for i, stage in programs.items()}
    for name, index in (unused or {}).items():
        if index in inputs:
            inputs[index][name in buffers].append(name)
    own: dict[int, dict[str, nn.Parameter]] = {}
    empty: dict[str, Tensor] = {}
    tied_copies: list[nn.Parameter] = []
    used: set[str] = set()
    for index, (names, _) in sorted(inputs.items()):
        own[index], device = {}, where[index]
        for name in names:
            tensor = parameters[name]
            if tensor.is_meta:
                tensor = nn.Parameter(unallocated(tensor, device), tensor.requires_grad)
                if name in used:
                    tied_copies.append(tensor)
                else:
                    empty[name] = tensor
            elif name in used:
                tensor = nn.Parameter(tensor.detach().to(device, copy=True), tensor.requires_grad)
            elif tensor.device != device:
                tensor.data = tensor.data.to(device)
            own[index][name] = tensor
            used.add(name)
    held, copies = _own_buffers(buffers, {i: names for i, (_, names) in inputs.items()}, where, empty)
    return OwnTensors(own, held, empty, tuple(tied_copies), tuple(copies))


def _own_buffers(
    buffers: Mapping[str, Tensor],
    read: Mapping[int, Sequence[str]],
    where: Mapping[int, torch.device],
    empty: dict[str, Tensor],
) -> tuple[dict[int, dict[str, Tensor]], list[tuple[Tensor, Tensor]]]:
    """Each local stage's buffers, and (copy, original) pairs; adds buffers on meta to ``empty``."""
    first: dict[str, Tensor] = {}
    placed: dict[tuple[str, torch.device], Tensor] = {}
    held: dict[int, dict[str, Tensor]] = {}
    copies = []
    for index, names in sorted(read.items()):
        held[index], device = {}, where[index]
        for name in names:
            buffer = buffers[name]
            if name not in first:
                if buffer.is_meta:
                    buffer = empty[name] = unallocated(buffer, device)
                elif buffer.device != device:
                    buffer.data = buffer.data.to(device)
                first[name] = placed[name, device] = buffer
            elif (name, device) not in placed:
                placed[name, device] = torch.empty_like(first[name], device=device)
                copies.append((placed[name, device], first[name]))
            held[index][name] = placed[name, device]
    return held, copies


def install(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Replace the model's meta tensors, under all their names.

    Args:
        tensors: by first name.
    """
    for name, held in places(model).items():
        for place in held if name in tensors else ():
            setattr(place.module, place.leaf, tensors[name])  # by attribute: recurrent layers also keep a list of them


def release_others(model: nn.Module, kept: set[str], stale: frozenset[str], holders: Mapping[str, str]) -> None:
    """Move the tensors of other processes to the meta device, where every use of their values raises an error.

    Args:
        kept: names of the parameters that stay; the others are replaced by meta tensors.
        stale: buffers that another process writes: their values here would be outdated.
        holders: name of each other parameter → the rank that holds it, in words.
    """
    for name, held in places(model).items():
        tensor = tensor_at(held[0])
        if name in kept if isinstance(tensor, nn.Parameter) else name not in stale:
            continue
        holder = holders.get(name, "another rank")
        if not tensor.is_meta:
            meta: Tensor = tensor.detach().to("meta")
            if isinstance(tensor, nn.Parameter):
                meta = nn.Parameter(meta, tensor.requires_grad)
            for place in held:  # a tied weight stays one tensor under all its names
                setattr(place.module, place.leaf, meta)
            make_remote(tensor, name, holder)  # the user may have a reference, and its values no longer change
            tensor = meta
        make_remote(tensor, name, holder)


def copy_tied_weights(plan: Plan, own: Mapping[int, Mapping[str, nn.Parameter]], team: Team) -> None:
    """Copy the value of each tied weight from the first of its stages to the others.

    Args:
        own: stage of this process → name → parameter.
    """

    def work(device: int) -> None:
        backend = team.backend(device)
        sent: list[Handle] = []
        for weight in plan.tied:
            first, *others = dict.fromkeys(plan.placement[stage] for stage in weight.stages)
            here = [own[stage][weight.name].detach() for stage in weight.stages if plan.placement[stage] == device]
            if not here:
                continue
            if device == first:
                sent += [backend.send([here[0].contiguous()], other) for other in others]
            else:
                value = torch.empty_like(here[0], memory_format=torch.contiguous_format)
                backend.receive([value], first).wait()
                here[0].copy_(value)
            for replica in here[1:]:
                replica.copy_(here[0])
        for handle in sent:
            handle.wait()

    team.run_local(work)


def held_here(model: nn.Module, buffers: bool = False) -> dict[str, Tensor]:
    """The parameters, and with ``buffers`` the buffers, that have values in this process; each once, by name."""
    found: dict[str, Tensor] = dict(model.named_parameters())
    if buffers:
        found |= dict(model.named_buffers())
    return {name: t for name, t in found.items() if not isinstance(t, RemoteTensor) and not t.is_meta}


def update_copies(model: nn.Module, states: Mapping[int, StageState]) -> None:
    """Copy the model's tensors to this process's other copies of tied weights and buffers."""
    own: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for state in states.values():
            for name, tensor in (*state.parameters.items(), *state.buffers.items()):
                if tensor is not own[name] and not own[name].is_meta:
                    tensor.copy_(own[name])
