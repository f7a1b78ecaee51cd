"""Refuses a step that sets a seed and then draws: in eager PyTorch its numbers repeat, in a pipeline they would not.

A captured step draws from keyed streams (`graph/randomness`), which no seed that the step sets can change: its numbers
would differ from step to step without a warning. So such a step is refused. A seed that is set before training, and a
generator that was made before it, are allowed.
"""

import sys
from types import FrameType
from typing import Any

from .capture_errors import Refused
from .code_origin import is_own, is_users_own

_SETS = frozenset({"manual_seed", "manual_seed_all", "set_rng_state", "fork_rng"})
_DRAWS = frozenset({
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "bernoulli", "poisson",
    "multinomial", "normal_", "uniform_", "bernoulli_", "random_", "exponential_", "log_normal_", "cauchy_",
    "geometric_", "rrelu", "gumbel_softmax", "scaled_dot_product_attention",
})  # fmt: skip


def draws(func: Any) -> bool:
    """Whether a function of torch may draw random numbers, by its name."""
    name = getattr(func, "__name__", "")
    return name in _DRAWS or "dropout" in name


def refuse_draws_after_a_seed() -> None:
    """Refuse a draw in a function of the user's, or called by one, that sets a seed.

    Raises:
        Refused: there is such a function on the way from the step.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_own(frame.f_code.co_filename):
        frame = frame.f_back
    while frame is not None and not is_own(frame.f_code.co_filename):
        code = frame.f_code
        if is_users_own(code.co_filename) and not _SETS.isdisjoint(code.co_names):
            raise Refused(
                "the step sets the seed or the state of a random number generator, and then draws: eager PyTorch draws "
                "the same numbers in each step, a captured step would not; set the seed before training, or give the "
                "numbers with the batch"
            )
        frame = frame.f_back
