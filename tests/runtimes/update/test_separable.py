"""Optimizers whose update of a parameter depends on other parameters are refused: each stage has its own optimizer."""

import pytest
import torch
from panpipe.core.errors import RequestError
from panpipe.runtimes.update.trials import check_separable
from torch import nn


def stages(count=2):
    return [{f"{stage}.weight": nn.Parameter(torch.ones(4, 2, device="meta"))} for stage in range(count)]


class NormOfAll(torch.optim.SGD):
    """Divides each gradient by the norm of all of them."""

    def step(self, closure=None):
        every = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in every]).norm()
        for p in every:
            p.grad /= norm
        return super().step(closure)


def test_update_that_depends_on_other_parameters_is_refused():
    with pytest.raises(RequestError, match=r"NormOfAll changes '0\.weight' differently .* of all stages"):
        check_separable(lambda named: NormOfAll([p for _, p in named], lr=0.1), stages())


def test_options_that_depend_on_the_number_of_parameters_are_refused():
    with pytest.raises(RequestError, match=r"gives '0\.weight' other options .*\(lr 0\.5 and 1\.0\)"):
        check_separable(lambda named: torch.optim.SGD([p for _, p in named], lr=1 / len(named)), stages())
