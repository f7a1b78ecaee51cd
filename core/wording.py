"""Counts of things and the size of a plan in words, for everything that tells people of them."""

from .plan import Plan


def counted(count: int, noun: str) -> str:
    """A number of things: ``1 device``, ``2 devices``, ``2 microbatches``."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{count} {noun}{'' if count == 1 else plural}"


def plan_size(plan: Plan) -> str:
    """How large a plan is: ``4 stages on 2 × 4 devices, 8 microbatches``; 2 are its replicas."""
    one = plan.mesh.data == 1
    devices = counted(plan.devices, "device") if one else f"{plan.mesh.data} × {plan.devices} devices"
    return f"{counted(len(plan.stages), 'stage')} on {devices}, {counted(plan.microbatches, 'microbatch')}"
