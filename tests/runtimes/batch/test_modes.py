"""Modes of modules: which one differs, and what is refused."""

import pytest
from panpipe.core.errors import RequestError
from panpipe.runtimes.batch.modes import ModuleModes
from torch import nn


def model():
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout(0.5)))


def test_modes_are_those_of_every_module_and_their_difference_is_named():
    module = model()
    modes = ModuleModes(module)
    before = modes.now()
    assert before == (True,) * 4
    module[1].eval()
    assert modes.now() == (True, True, False, False)
    assert modes.first_other(before, modes.now()) == "1"
    assert modes.first_other(before, before) is None


@pytest.mark.parametrize(
    ("start", "then", "now"), [(True, "training", "evaluation"), (False, "evaluation", "training")]
)
def test_other_mode_of_the_model_is_refused_until_it_is_restored(start, then, now):
    module = model().train(start)
    modes = ModuleModes(module)
    modes.refuse_other_mode()
    module.train(not start)
    with pytest.raises(RequestError, match=f"the model is in {now} mode and was captured in {then} mode") as error:
        modes.refuse_other_mode()
    assert "\n" not in str(error.value)
    module.train(start)
    modes.refuse_other_mode()


def test_other_mode_of_a_single_module_is_not_refused():
    module = model()
    modes = ModuleModes(module)
    module[1][0].eval()
    modes.refuse_other_mode()
