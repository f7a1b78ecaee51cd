"""Plans without a pipeline: every replica is one device.

Where such a plan takes hardly longer than the work alone on all devices, no pipeline can be much faster, and none is
searched: the difference would be less than the error of a prediction.
"""

from collections.abc import Sequence

from attrs import evolve

from .confirm import SearchResult
from .problem.setting import Setting
from .search_options import SearchOptions

NEAR = 0.03
"""Share of the step by which pipelines may be faster and are still not searched."""
ORDERS = ("gpipe", "1f1b", "interleaved-1f1b")
"""The schedules of one device: each order takes as long, and with several stages reductions begin earlier."""


def without_pipeline(options: SearchOptions) -> SearchOptions:
    """The options of a search for these plans: without orders that make no difference on one device."""
    if len(options.families) == 1:
        return options
    plain = tuple(family for family in options.families if family.name in ORDERS)
    return evolve(options, families=plain or options.families, anneal=not plain)


def nearly_as_fast(found: SearchResult, settings: Sequence[Setting]) -> bool:
    """Whether no plan in any of these settings can be faster than the one found by more than ``NEAR``."""
    return found.best.predicted.step_s <= (1 + NEAR) * min(setting.bound_s for setting in settings)
