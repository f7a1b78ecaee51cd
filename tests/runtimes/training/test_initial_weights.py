"""Models that ranks begin with: differences by name, what a checkpoint overwrites, and what is refused."""

import pytest
import torch
from panpipe.core.errors import RequestError
from panpipe.runtimes.training.initial_weights import compare_initial_weights
from panpipe.runtimes.weights import weights_from
from torch import nn


class Ranks:
    """A team of which this process is rank 0; what the other ranks answer to both questions is given."""

    local, tensor = (0,), None

    def __init__(self, *others):
        self._answers, self.size = others, 1 + len(others)

    def everywhere(self, work):
        mine = work(0)
        return [mine, *(digest if isinstance(mine, str) else values for digest, values in self._answers)]

    def rank(self, number):
        return 10 + number


class Asked(Ranks):
    """A team whose only other rank never agrees: what this process is asked for is kept."""

    def __init__(self):
        super().__init__(("", {}))
        self.kept = []

    def everywhere(self, work):
        self.kept.append(work(0))
        return super().everywhere(work)


def answers(module):
    """Digest and values of a rank that has this model."""
    team = Asked()
    compare_initial_weights(team, module, weights_from(None, module, 0))
    digest, values = team.kept
    return digest, values


def model(**changes):
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    made.register_buffer("scratch", torch.zeros(2), persistent=False)
    for name, change in changes.items():
        change(made.get_parameter(name) if name in dict(made.named_parameters()) else made.get_buffer(name))
    return made


def compare(*others, **options):
    first = model(**options)
    return compare_initial_weights(Ranks(*map(answers, others)), first, weights_from(None, first, 0))


def one_more(tensor):
    with torch.no_grad():
        tensor.add_(1)


def test_equal_models_have_no_differences():
    found = compare(model(), model())
    assert found.warning is None
    found.refuse_different()


def test_first_tensor_that_differs_is_refused_with_the_number_of_others():
    found = compare(model(), model(**{"0.weight": one_more, "1.running_mean": one_more}))
    with pytest.raises(RequestError, match=r"'0\.weight' has other values on rank 12 than on rank 10, and so") as error:
        found.refuse_different()
    assert "and so have 1 more: all ranks must start with the same model" in str(error.value)
    assert str(error.value).endswith(", or call resume() before the first step")
    assert found.warning.endswith("resume from a checkpoint before the first step")


def test_checkpoint_overwrites_what_it_has():
    found = compare(model(**{"0.weight": one_more}))
    found.forget_overwritten()
    found.refuse_different()
    both = compare(model(**{"0.weight": one_more, "scratch": one_more}))
    both.forget_overwritten()
    with pytest.raises(RequestError, match="'scratch' has other values") as error:
        both.refuse_different()
    assert "resume()" not in str(error.value)


def test_model_on_meta_on_one_rank_is_named():
    found = compare(model().to("meta"))
    with pytest.raises(RequestError, match=r"'0\.weight' has values on rank 10 and is on meta on rank 11"):
        found.refuse_different()
