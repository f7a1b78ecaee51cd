"""Counts and names of things and the size of a plan in words, for everything that tells people of them."""

from collections.abc import Sequence

from .plan import Plan


def counted(count: int, noun: str) -> str:
    """A number of things: ``1 device``, ``2 devices``, ``2 microbatches``."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{count} {noun}{'' if count == 1 else plural}"


def first_of(names: Sequence[str], shown: int = 1) -> str:
    """The first of some names, and how many more there are: ``wte.weight and 3 more``."""
    more = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {more} more" if more > 0 else "")


def module_text(name: str) -> str:
    """A module by its qualified name: ``module 'h.0.attn'``; ``the model`` is the one without a name."""
    return f"module '{name}'" if name else "the model"


def plan_size(plan: Plan) -> str:
    """How large a plan is: ``4 stages on 2 × 4 devices, 8 microbatches``; 2 are its replicas."""
    one = plan.mesh.data == 1
    devices = counted(plan.devices, "device") if one else f"{plan.mesh.data} × {plan.devices} devices"
    return f"{counted(len(plan.stages), 'stage')} on {devices}, {counted(plan.microbatches, 'microbatch')}"
