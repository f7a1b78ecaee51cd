"""Schedules by name: panpipe's own, and those of other packages.

To add a schedule here, write a module with a ``ScheduleFamily`` and list it in ``BUILT_IN``. A package adds one through
the entry-point group ``panpipe.schedules``: the entry point names a ``ScheduleFamily``.
"""

from functools import cache

from ..errors import RequestError, warn_caller
from ..plugins import load_plugins
from ..wording import nearest
from . import (
    building_block,
    dualpipe_v,
    gis,
    gpipe,
    interleaved,
    looped,
    one_f_one_b,
    pipe_offload,
    v_shaped,
    zb_v,
    zero_bubble,
)
from .problem import ScheduleFamily, resident

GROUP = "panpipe.schedules"
BUILT_IN = (
    gpipe.FAMILY,
    one_f_one_b.FAMILY,
    interleaved.FAMILY,
    looped.FAMILY,
    zero_bubble.ZB_H1,
    zero_bubble.ZB_H2,
    zero_bubble.ZB_1P,
    zero_bubble.ZB_2P,
    zb_v.FAMILY,
    v_shaped.V_MIN,
    v_shaped.V_HALF,
    v_shaped.ONE_F_ONE_B_V,
    gis.GIS,
    gis.GIS_H,
    pipe_offload.PO_H,
    pipe_offload.PO_F,
    dualpipe_v.FAMILY,
    building_block.FAMILY,
)


@cache
def families() -> dict[str, ScheduleFamily]:
    """All families by name: panpipe's own, then those of plug-ins.

    A plug-in that cannot be loaded, is not a ``ScheduleFamily``, or has a name in use is skipped with a warning that
    names it and its package.
    """
    found = {family.name: family for family in BUILT_IN}

    def add(family: object) -> None:
        if not isinstance(family, ScheduleFamily):
            raise RequestError(f"it is a {type(family).__name__}, not a ScheduleFamily")
        if family.name in found:
            raise RequestError(f"the name '{family.name}' is taken")
        found[family.name] = family

    for one in load_plugins(GROUP, add):
        warn_caller(str(one))
    return found


def resident_families() -> list[ScheduleFamily]:
    """The families whose schedules keep all saved tensors on the device: what a search without offload chooses from."""
    return list(resident(families().values()))


def find_family(name: str) -> ScheduleFamily:
    """The family of that name.

    Raises:
        RequestError: there is none; the message lists the nearest names.
    """
    known = families()
    if not isinstance(name, str):
        raise RequestError(f"schedule is {name!r:.40}: give the name of one: {', '.join(known)}")
    if name not in known:
        raise RequestError(f"there is no schedule '{name}': {nearest(name, known)}")
    return known[name]
