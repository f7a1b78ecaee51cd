"""The shared tensors of one stage in one step: what all microbatches read and no microbatch changes.

The first F of a step computes them (``core/capture/programs/shared_program``); they are freed after the stage's last
action.
"""

from collections.abc import Sequence

import torch
from attrs import define, field
from torch import Tensor

from ...core.capture.graph.storages import storage_sizes
from ...core.capture.programs.generated_code import no_sink
from ...core.capture.programs.shared_program import Shared


@define(eq=False)
class SharedTensors:
    """The shared tensors of one stage, for all shapes of microbatches.

    Attributes:
        bytes: the largest number of bytes held in the last step, without parameters, buffers and constants.
    """

    bytes: int = field(default=0, init=False)
    _values: dict[tuple[str, tuple[int, ...]], list[Tensor]] = field(factory=dict, init=False)
    _storages: dict[int, int] = field(factory=dict, init=False)

    def of(self, program: Shared | None, fixed: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of a program, computed in the first call of a step.

        Args:
            program: of the stage, for any shape of microbatch; None for one without shared tensors.
            fixed: the stage's parameters, buffers and constants.
        """
        if program is None:
            return []
        key = program.key, tuple(id(fixed[i]) for i in program.reads)
        found = self._values.get(key)
        if found is None:
            with torch.no_grad():
                found = self._values[key] = program.run(list(fixed), no_sink)
            own = storage_sizes(fixed)
            self._storages |= {key: size for key, size in storage_sizes(found).items() if key not in own}
            self.bytes = sum(self._storages.values())
        return found

    @property
    def storages(self) -> set[int]:
        """Addresses of the storages held now."""
        return set(self._storages)

    def free(self) -> None:
        """Free all tensors, after the last action of a step that reads them."""
        self._values.clear()
        self._storages.clear()
