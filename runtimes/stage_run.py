"""A stage's programs bound to its tensors: what one device runs for one microbatch shape."""

from typing import Any

import torch
from torch import Tensor, nn

from ..core.actions import Kind
from ..core.capture.programs import Backward, StagePrograms
from ..core.capture.stage import Boundary
from .state import StageState

_KEY = -1
"""Stands for the random key where a leaf of the batch may stand."""

Layout = dict[tuple[int, int], tuple[Boundary, ...]]


class StageRun:
    """One stage, ready to run.

    Between F and the backward of a microbatch it holds the saved tensors and nothing else.

    Args:
        index: the stage.
        programs: its programs.
        layout: the tensors of every message between stages.
        state: parameters and buffers.
        constants: values of the captured constants, by placeholder.
        loss: node name of the loss.
    """

    def __init__(
        self, index: int, programs: StagePrograms, layout: Layout, state: StageState,
        constants: dict[str, Tensor], loss: str,
    ) -> None:  # fmt: skip
        inputs = programs.inputs
        self.index = index
        self.programs = programs
        self.state = state
        self._static: list[Any] = [
            *(state.parameters[name] for name in inputs.parameters),
            *(state.buffers[name] for name in inputs.buffers),
            *(constants[name] for name in inputs.constants),
        ]
        self._kept = len(inputs.boundary)
        incoming = {src: boundary for (src, dst), boundary in layout.items() if dst == index}
        outgoing = {dst: boundary for (src, dst), boundary in layout.items() if src == index}
        self.sources = [
            next((src, [b.name for b in tensors].index(wanted.name)) for src, tensors in incoming.items() if wanted in tensors)
            for wanted in inputs.boundary
        ]
        self.senders = tuple(dict.fromkeys(src for src, _ in self.sources))
        position = {boundary.name: i for i, boundary in enumerate(programs.outputs)}
        self.outgoing = {dst: [position[b.name] for b in tensors] for dst, tensors in outgoing.items()}
        # Gradients of an output are summed from its last reader to its first, as autograd does in one process.
        self.tangents = {
            position[b.name]: [
                (dst, [g.name for g in outgoing[dst] if g.differentiable].index(b.name))
                for dst in sorted(outgoing, reverse=True)
                if b in outgoing[dst]
            ]
            for b in programs.outputs
            if b.differentiable
        }
        self.receivers = tuple(dict.fromkeys(dst for sources in self.tangents.values() for dst, _ in sources))
        place = {boundary.name: i for i, boundary in enumerate(inputs.boundary)}
        self.returned = {
            src: [place[b.name] for b in tensors if b.differentiable]
            for src, tensors in incoming.items()
            if any(b.differentiable for b in tensors)
        }
        self._messages: dict[tuple[Kind, int], list[tuple[tuple[int, ...], torch.dtype]]] = {
            **{(Kind.RECV_F, src): [(b.shape, b.dtype) for b in tensors] for src, tensors in incoming.items()},
            **{
                (Kind.RECV_B, dst): [(b.shape, b.dtype) for b in tensors if b.differentiable]
                for dst, tensors in outgoing.items()
            },
        }
        self._loss = len(programs.outputs) + programs.results.index(loss) if loss in programs.results else None
        # Gradients of boundary inputs come first: they have the lower places among the inputs.
        halves = (programs.backward, programs.backward_input, programs.backward_weight)
        self._fixed = {id(p): self._backward_input_getters(p) for p in halves}
        self._split: dict[int, tuple[int, int]] = {}
        self._trained: dict[int, list[nn.Parameter]] = {}
        for program in halves:
            if program is not None:
                first = sum(place < self._kept for place in program.gradients)
                self._split[id(program)] = first, len(program.gradients)
                self._trained[id(program)] = [self._static[i - self._kept] for i in program.gradients[first:]]
        self._saved: dict[int, list[Any]] = {}
        self._created: dict[int, list[Any]] = {}
        self._foreign = {t.untyped_storage()._cdata for t in self._static}

    def message(self, kind: Kind, peer: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every tensor in the message that a receive from stage ``peer`` gets."""
        return self._messages[kind, peer]

    def _forward_inputs(self, boundary: list[Any], leaves: tuple[Any, ...], key: Tensor) -> list[Any]:
        inputs = self.programs.inputs
        values = boundary + self._static + [leaves[i] for i in inputs.batch]
        if inputs.random:
            values.append(key)
        return values

    def _backward_input_getters(self, program: Backward | None) -> tuple[list[Any], list[tuple[int, int]]]:
        """The inputs of a backward program that never change, and (place, leaf) of those that come with the batch."""
        if program is None:
            return [], []
        fixed: list[Any] = []
        fill: list[tuple[int, int]] = []
        batch = self.programs.inputs.batch
        for i in program.inputs:
            place = i - self._kept
            if place < len(self._static):
                fixed.append(self._static[place])
            else:
                leaf = place - len(self._static)
                fill.append((len(fixed), batch[leaf] if leaf < len(batch) else _KEY))
                fixed.append(None)
        return fixed, fill

    def forward(
        self, microbatch: int, boundary: list[Any], leaves: tuple[Any, ...], key: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """F. Returns the outputs, and the parts of the step's result computed here."""
        programs = self.programs
        values = programs.forward(self._forward_inputs(boundary, leaves, key))
        outputs = len(programs.outputs)
        results = outputs + len(programs.results)
        mutated = results + len(programs.mutated)
        for place, value in zip(programs.mutated, values[results:mutated], strict=True):
            self._static[place - self._kept].copy_(value)
        self._saved[microbatch] = values[mutated:]
        return values[:outputs], values[outputs:results]

    def held(self, microbatch: int) -> list[Any]:
        """The saved tensors of a microbatch."""
        return self._saved.get(microbatch, []) + self._created.get(microbatch, [])

    @property
    def persistent(self) -> set[int]:
        """Storages that live for the whole of training."""
        return self._foreign

    def backward(
        self, microbatch: int, tangents: dict[int, Tensor], seed: Tensor, leaves: tuple[Any, ...], key: Tensor
    ) -> dict[int, Tensor]:
        """B. Returns the gradients of boundary inputs, by position."""
        saved = self._saved.pop(microbatch)
        program = self.programs.backward
        return {} if program is None else self._run(program, saved, [], tangents, seed, leaves, key)[0]

    def backward_input(
        self, microbatch: int, tangents: dict[int, Tensor], seed: Tensor, leaves: tuple[Any, ...], key: Tensor
    ) -> dict[int, Tensor]:
        """I. A stage that has no program of its own for it does the whole backward here or in W, whichever is right:
        here where gradients go back, in W where none does."""
        programs = self.programs
        first, second = programs.backward_input, programs.backward_weight
        if first is None or second is None:
            if self.returned:
                return self.backward(microbatch, tangents, seed, leaves, key)
            self._created[microbatch] = [tangents]
            return {}
        saved = self._saved[microbatch]
        gradients, created = self._run(first, saved, [], tangents, seed, leaves, key)
        keep = set(second.saved)
        self._saved[microbatch] = [value if i in keep else None for i, value in enumerate(saved)]
        self._created[microbatch] = created
        return gradients

    def backward_weight(self, microbatch: int, seed: Tensor, leaves: tuple[Any, ...], key: Tensor) -> None:
        """W."""
        created = self._created.pop(microbatch, [])
        program = self.programs.backward_weight
        if self.programs.backward_input is None or program is None:
            if microbatch in self._saved:
                self.backward(microbatch, created[0] if created else {}, seed, leaves, key)
            return
        self._run(program, self._saved.pop(microbatch), created, {}, seed, leaves, key)

    def _run(
        self, program: Backward, saved: list[Any], created: list[Any], tangents: dict[int, Tensor],
        seed: Tensor, leaves: tuple[Any, ...], key: Tensor,
    ) -> tuple[dict[int, Tensor], list[Any]]:  # fmt: skip
        if self._loss is not None:
            tangents = {**tangents, self._loss: seed}
        fixed, fill = self._fixed[id(program)]
        given = [saved[i] for i in program.saved] + [created[i] for i in program.created] + fixed
        for place, leaf in fill:
            place += len(program.saved) + len(program.created)
            given[place] = key if leaf == _KEY else leaves[leaf]
        given += [tangents[i] for i in program.tangents]
        if program is not self.programs.backward_input:
            saved.clear()
            created.clear()
        values = program.run(given)
        ends = self._split[id(program)]
        boundary = dict(zip(program.gradients[: ends[0]], values[: ends[0]], strict=True))
        self.state.accumulate(
            self._trained[id(program)], values[ends[0] : ends[1]], self._foreign, (*tangents.values(), *boundary.values())
        )
        return boundary, values[ends[1] :]

    def gradient_message(self, source: int, gradients: dict[int, Tensor]) -> list[Tensor]:
        """The message of gradients for stage ``source``: contiguous, zeros where nothing flows back."""
        boundary = self.programs.inputs.boundary
        return [
            gradients[place].contiguous()
            if place in gradients
            else torch.zeros(boundary[place].shape, dtype=boundary[place].dtype)
            for place in self.returned[source]
        ]
