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
    ("start", "change", "said"),
    [
        (lambda m: m.train(), lambda m: m[1][0].eval(), r"'1\.0'.* is in evaluation mode and was captured in training"),
        (lambda m: m.eval(), lambda m: m[0].train(), r"'0'.* is in training mode and was captured in evaluation"),
        (lambda m: m.train(), lambda m: m.eval(), "the model.* is in evaluation mode and was captured in training"),
    ],
)
def test_other_modes_are_refused_with_the_module_until_they_are_restored(start, change, said):
    module = model()
    start(module)
    modes = ModuleModes(module)
    modes.refuse_others()
    change(module)
    with pytest.raises(RequestError, match=said) as error:
        modes.refuse_others()
    assert "\n" not in str(error.value)
    start(module)
    modes.refuse_others()
