"""The modes of a model's modules, training or evaluation: a captured step has the modes of its capture."""

from torch import nn

from ...core.errors import RequestError

Modes = tuple[bool, ...]
"""For every module whether it is in training mode."""


class ModuleModes:
    """The modes of a model's modules at the creation of this object."""

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

    def refuse_other_mode(self) -> None:
        """Refuse to train a model that is in the other mode as a whole, as after an evaluation without ``train()``.

        Modes of single modules may change, as where BatchNorm is frozen later: the step is captured again for them.

        Raises:
            RequestError: the model's mode has changed.
        """
        then, now = self._then[0], self.now()[0]
        if then is not now:
            words = {True: "training", False: "evaluation"}
            raise RequestError(
                f"the model is in {words[now]} mode and was captured in {words[then]} mode: a pipeline trains in the "
                "mode that its model had; restore it, as model.train() does after an evaluation, or build another "
                "pipeline"
            )
