"""The size of a plan as text for messages."""

from ..wording import counted
from .plan import Plan


def plan_size(plan: Plan) -> str:
    """The size of a plan: ``4 stages on 2 × 4 devices, 8 microbatches for each replica``; ranks come last."""
    one = plan.mesh.data == 1
    devices = counted(plan.devices, "device") if one else f"{plan.mesh.data} × {plan.devices} devices"
    if plan.mesh.width > 1:
        devices = f"{devices.removesuffix(' devices').removesuffix(' device')} × {plan.mesh.width} devices"
    each = "" if one else " for each replica"
    return f"{counted(len(plan.stages), 'stage')} on {devices}, {counted(plan.microbatches, 'microbatch')}{each}"
