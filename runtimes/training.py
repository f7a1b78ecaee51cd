"""How a model is trained beside its plan, as users say it: clipping, loss scaling, schedulers."""

from attrs import frozen

from ..core.errors import RequestError


@frozen
class Training:
    """What happens in an update beside the optimizers' steps.

    Args:
        clip_norm: the most that the global 2-norm of all gradients may be; infinity only measures it; None for neither.
    """

    clip_norm: float | None = None

    def __attrs_post_init__(self) -> None:
        given = self.clip_norm
        if given is not None and (isinstance(given, bool) or not isinstance(given, int | float) or not given > 0):
            raise RequestError(
                f"clip_norm is {given!r}: gradients are clipped to a norm above 0; give a positive number, math.inf to "
                "measure the norm alone, or None"
            )

    @property
    def needs_all_stages(self) -> bool:
        """Whether no stage may step before all have been asked."""
        return self.clip_norm is not None
