"""The modes of a model's modules, training or evaluation: a captured step has the modes of its capture."""

from torch import nn

from ...core.errors import RequestError
from ...core.wording import module_text

Modes = tuple[bool, ...]
"""For every module whether it is in training mode."""


class ModuleModes:
    """The modes of a model's modules at the creation of this object.

    Args:
        model: the user's module.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._then = self.now()

    def now(self) -> Modes:
        """The current modes."""
        return tuple(module.training for module in self._modules.values())

    def first_other(self, one: Modes, other: Modes) -> str | None:
        """Name of the first module whose mode differs between the two; None if none does."""
        found = zip(self._modules, one, other, strict=True)
        return next((name for name, here, there in found if here is not there), None)

    def refuse_others(self) -> None:
        """Refuse to train in other modes: otherwise, for example, dropout would silently stay active.

        Raises:
            RequestError: a module's mode has changed.
        """
        name = self.first_other(self._then, self.now())
        if name is not None:
            now, then = ("training", "evaluation")[:: 1 if self._modules[name].training else -1]
            raise RequestError(
                f"{module_text(name)} is in {now} mode and was captured in {then} mode: a pipeline trains in the mode "
                "that its model had; restore it, as model.train() does after an evaluation, or build another pipeline"
            )
