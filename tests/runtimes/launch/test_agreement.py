"""What ranks compare before they plan: differences are named with both values."""

import pytest
import torch
from panpipe.core.errors import RequestError
from panpipe.runtimes.launch.agreement import check_same, model_in_words

from ...support.cuts import captured
from ...support.models import CASES


class Ranks:
    """A team of which this process is rank ``here``: what others would return is given."""

    replicas = 1

    def __init__(self, here, others):
        self.local, self.size, self._others = (here,), len(others), others
        self._asked = 0

    def everywhere(self, work):
        """The first time digests are asked for, which the others' are not equal to; then what they were given."""
        self._asked += 1
        mine = work(self.local[0])
        if self._asked == 1:
            return [mine if other is None else f"digest of {other}" for other in self._others]
        return [mine if other is None else {name: str(v) for name, v in other.items()} for other in self._others]

    def rank(self, number):
        return 10 + number


@pytest.mark.parametrize(
    ("mine", "others", "said"),
    [
        ({"seed": 0}, [{"seed": 0}, None, {"seed": 3}], "rank 12 has seed=3 and rank 10 has seed=0"),
        ({"seed": 0}, [{"seed": 0, "b": 2}, None], "rank 11 has no b and rank 10 has b=2"),
        ({"seed": 0, "b": 2}, [{"seed": 0}, None], "rank 11 has b=2 and rank 10 has no b"),
        ({"a": 1, "b": 2}, [{"b": 3, "a": 4}, None], "rank 11 has b=2 and rank 10 has b=3"),
    ],
)
def test_first_difference_from_rank_0_is_refused_with_both_values(mine, others, said):
    with pytest.raises(RequestError, match=said):
        check_same(Ranks(1, others), mine)


def test_equal_ranks_compare_digests_alone():
    team = Ranks(0, [None, None])
    check_same(team, {"seed": 0, "limit": float("nan")})
    assert team._asked == 1


def test_devices_of_one_process_have_nothing_to_compare():
    team = Ranks(0, [None])
    check_same(team, {"seed": 0})
    assert team._asked == 0


def test_model_in_words_has_modes_parameters_and_what_the_step_returns():
    case = CASES["batchnorm with a skip"]
    operators, model = captured(case, torch.float32, 4, 2), case.model(torch.float32)
    words = model_in_words(model, operators)
    assert words["stem.weight"] == "4×3×3×3 torch.float32"
    assert words["norms.0.training"] == words["model.training"] == "True"
    assert words["a step that returns"] == "a loss"
    model.stem.weight.requires_grad_(False)
    model.norms[0].eval()
    changed = model_in_words(model, operators)
    assert {name for name in words if words[name] != changed[name]} == {"stem.weight", "norms.0.training"}
    assert changed["stem.weight"].endswith(", frozen")
