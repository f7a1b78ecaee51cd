"""Refuses a step that sets a seed and then draws: in eager PyTorch its numbers repeat, in a pipeline they would not.

A captured step draws from keyed streams (`graph/randomness`), which no seed that the step sets can change: its numbers
would differ from step to step without a warning. So such a step is refused. A seed that is set before training, and a
generator that was made before it, are allowed.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any
from unittest import mock

import torch

from .capture_errors import Refused
from .code_origin import is_own, is_users_own

_SETS = frozenset({"manual_seed", "manual_seed_all", "set_rng_state", "fork_rng"})
_DRAWS = frozenset({
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "bernoulli", "poisson",
    "multinomial", "normal_", "uniform_", "bernoulli_", "random_", "exponential_", "log_normal_", "cauchy_",
    "geometric_", "rrelu", "gumbel_softmax", "scaled_dot_product_attention",
})  # fmt: skip


class SetSeeds:
    """The calls of ``torch.manual_seed`` while a step runs.

    Attributes:
        called: whether there was one.
    """

    def __init__(self) -> None:
        self.called = False

    @contextmanager
    def observed(self) -> Iterator[None]:
        """The context of the run."""
        original = torch.manual_seed

        def set_seed(seed: Any) -> torch.Generator:
            self.called = True
            return original(seed)

        with (
            mock.patch.object(torch, "manual_seed", set_seed),
            mock.patch.object(torch.random, "manual_seed", set_seed),
        ):
            yield

    def refuse_draws(self, func: Any) -> None:
        """Refuse an operator that draws after the step has set a seed, or in a function that sets one.

        Args:
            func: the function that torch is about to call.

        Raises:
            Refused: it is such an operator.
        """
        if draws(func) and (self.called or _sets_a_seed(sys._getframe(1))):
            raise Refused(
                "the step sets the seed or the state of a random number generator, and then draws: eager PyTorch draws "
                "the same numbers in each step, a captured step would not; set the seed before training, or give the "
                "numbers with the batch"
            )


def draws(func: Any) -> bool:
    """Whether a function of torch may draw random numbers, by its name."""
    name = getattr(func, "__name__", "")
    return name in _DRAWS or "dropout" in name


def _sets_a_seed(frame: FrameType | None) -> bool:
    """Whether a function of the user's, on the way from the step to a frame, names a function that sets a seed."""
    while frame is not None and is_own(frame.f_code.co_filename):
        frame = frame.f_back
    while frame is not None and not is_own(frame.f_code.co_filename):
        code = frame.f_code
        if is_users_own(code.co_filename) and not _SETS.isdisjoint(code.co_names):
            return True
        frame = frame.f_back
    return False
