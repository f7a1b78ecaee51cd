"""Which process holds which parameter: its own stages' alone, the user's own tensors, under their own names."""

from collections.abc import Mapping

import torch
from attrs import frozen
from torch import Tensor, nn

from ...backends.contract import Handle
from ...core.capture.programs.programs import StagePrograms
from ...core.plan.plan import Plan
from ..batch.remote_tensors import make_remote
from ..launch.team import Team
from ..weights import places, tensor_at
from ..weights.allocation import unallocated


@frozen
class OwnTensors:
    """What the stages of this process hold.

    Args:
        parameters: stage index → name → parameter.
        buffers: stage index → name → buffer; stages on one device share them.
        unallocated: name → tensor, for those that are on meta in the user's model: they have no memory yet.
        replicas: further parameters without memory yet, of tied weights that several stages here hold.
        copies: buffers that stages on several devices read and none writes: (copy, the one it is of).
    """

    parameters: dict[int, dict[str, nn.Parameter]]
    buffers: dict[int, dict[str, Tensor]]
    unallocated: dict[str, Tensor]
    replicas: tuple[nn.Parameter, ...]
    copies: tuple[tuple[Tensor, Tensor], ...] = ()

    @property
    def held(self) -> dict[str, Tensor]:
        """Each parameter and buffer once, by name; of a tied weight the first stage's."""
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
        """Everything that takes memory only when it gets values."""
        return [*self.unallocated.values(), *self.replicas]

    def copy_buffers(self) -> None:
        """Give copies of buffers the values of those that they are of."""
        for copy, original in self.copies:
            copy.copy_(original)


def own_tensors(
    model: nn.Module, programs: Mapping[int, StagePrograms], where: Mapping[int, torch.device]
) -> OwnTensors:
    """Give each local stage its parameters and buffers, on its device.

    The first local stage that reads a parameter gets the user's tensor, or if that is on meta an unallocated one that
    will take its place; a further stage gets a replica.

    Args:
        model: the user's module.
        programs: of the local stages.
        where: local stage → the device that it runs on. What is elsewhere is moved there as ``Module.to`` does: the
            user's tensors stay the same objects.
    """
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    own: dict[int, dict[str, nn.Parameter]] = {}
    empty: dict[str, Tensor] = {}
    replicas: list[nn.Parameter] = []
    used: set[str] = set()
    for index, stage in sorted(programs.items()):
        own[index], device = {}, where[index]
        for name in stage.inputs.parameters:
            tensor = parameters[name]
            if tensor.is_meta:
                tensor = nn.Parameter(unallocated(tensor, device), tensor.requires_grad)
                if name in used:
                    replicas.append(tensor)
                else:
                    empty[name] = tensor
            elif name in used:
                tensor = nn.Parameter(tensor.detach().to(device, copy=True), tensor.requires_grad)
            elif tensor.device != device:
                tensor.data = tensor.data.to(device)
            own[index][name] = tensor
            used.add(name)
    held, copies = _own_buffers(buffers, programs, where, empty)
    return OwnTensors(own, held, empty, tuple(replicas), tuple(copies))


def _own_buffers(
    buffers: Mapping[str, Tensor],
    programs: Mapping[int, StagePrograms],
    where: Mapping[int, torch.device],
    empty: dict[str, Tensor],
) -> tuple[dict[int, dict[str, Tensor]], list[tuple[Tensor, Tensor]]]:
    """Each local stage's buffers, and copies with what they are of; unallocated ones are added to ``empty``."""
    first: dict[str, Tensor] = {}
    placed: dict[tuple[str, torch.device], Tensor] = {}
    held: dict[int, dict[str, Tensor]] = {}
    copies = []
    for index, stage in sorted(programs.items()):
        held[index], device = {}, where[index]
        for name in stage.inputs.buffers:
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
    """Put tensors in the places of those that the model has on meta, under all their names.

    Args:
        model: the user's module.
        tensors: by first name.
    """
    for name, held in places(model).items():
        for place in held if name in tensors else ():
            setattr(place.module, place.leaf, tensors[name])  # by attribute: recurrent layers keep a list of their own


def release_others(model: nn.Module, kept: set[str], stale: frozenset[str], holders: Mapping[str, str]) -> None:
    """Put what other processes own on the meta device, and have it refuse whatever needs its values.

    Args:
        model: the user's module.
        kept: names of the parameters that stay; the others are replaced by meta ones.
        stale: buffers that another process writes, and which would go stale here.
        holders: who has the others, by name, in words.
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
            make_remote(tensor, name, holder)  # for who keeps it: its values no longer change
            tensor = meta
        make_remote(tensor, name, holder)


def equal_replicas(plan: Plan, own: Mapping[int, Mapping[str, nn.Parameter]], team: Team) -> None:
    """Give all replicas of each tied weight the value that the first of its stages has.

    Args:
        plan: the plan.
        own: this process's parameters: stage index → name → parameter.
        team: the devices.
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
