"""Steps whose Python keeps something from run to run: refused with the line, or captured where it changes nothing."""

import collections
import datetime
import functools
import itertools
import os
import random
import time
import types
from contextlib import nullcontext

import numpy
import pytest
import torch
from panpipe.core.capture.export import trial_runs
from panpipe.core.capture.export.repeatability import MAX_RUNS
from panpipe.core.capture.export.step import capture_step
from panpipe.core.errors import RequestError
from torch import nn
from torch.nn import functional as F

from ....support.programs.changing import names_a_line
from ....support.registry import Registry

CALLS = 0


def model(*middle):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), *(middle or (nn.Tanh(),)), nn.Linear(4, 4))


def fit(m, b):
    return F.mse_loss(m(b["x"]), b["x"])


def captured(m, step):
    return capture_step(m, step, {"x": torch.randn(2, 4)})


refused, right = Registry(), Registry()


@refused
def next_of_an_endless_count():
    counted = itertools.count(1)
    return model(), lambda m, b: fit(m, b) * next(counted)


@refused
def next_of_a_cycle_that_is_an_attribute():
    class Cycled(nn.Module):
        def __init__(self):
            super().__init__()
            self.factors = itertools.cycle([1.0, 2.0])

        def forward(self, x):
            return x * next(self.factors)

    return model(Cycled()), fit


@refused
def next_of_a_generator():
    annealed = (0.9**n for n in itertools.count())
    return model(), lambda m, b: fit(m, b) * next(annealed)


@refused
def loop_over_an_iterator_that_ends_early():
    numbers = iter(range(1, 1000))

    def step(m, b):
        for number in numbers:  # noqa: B007
            break
        return fit(m, b) * number

    return model(), step


@refused
def next_of_tensors_of_one_shape():
    tensors = iter([torch.full((1, 4), float(i)) for i in range(100)])
    return model(), lambda m, b: fit(m, b) + m(next(tensors)).mean()


@refused
def next_of_a_data_loader():
    loader = iter(torch.utils.data.DataLoader(torch.arange(400.0).view(100, 4), batch_size=2))
    return model(), lambda m, b: fit(m, b) + m(next(loader)).mean()


@refused
def generator_of_numpys():
    generator = numpy.random.default_rng(0)
    return model(), lambda m, b: fit(m, b) * float(generator.uniform())


@refused
def generator_of_pythons():
    generator = random.Random(0)
    return model(), lambda m, b: fit(m, b) * generator.random()


@refused
def clock():
    return model(), lambda m, b: fit(m, b) * (time.time() % 1)


@refused
def date():
    return model(), lambda m, b: fit(m, b) * datetime.datetime.now().microsecond


@refused
def count_in_a_dict():
    state = {"n": 0}

    def step(m, b):
        state["n"] += 1
        return fit(m, b) * state["n"]

    return model(), step


@refused
def count_in_a_dict_with_a_threshold():
    state = collections.defaultdict(int)

    def step(m, b):
        state["n"] += 1
        return fit(m, b) * (1.0 if state["n"] < 100 else 0.5)

    return model(), step


@refused
def count_that_chooses_between_two_parameters():
    class Turns(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0
            self.scales = nn.ParameterList(nn.Parameter(torch.ones(4)) for _ in range(2))

        def forward(self, x):
            self.calls += 1
            return x * self.scales[self.calls % 2]

    return model(Turns()), fit


@refused
def count_that_chooses_between_two_results():
    state = {"n": 0}

    class Turns(nn.Module):
        def forward(self, x):
            state["n"] += 1
            both = x.sin(), x.cos()
            return both[state["n"] % 2]

    return model(Turns()), fit


@refused
def count_that_chooses_between_two_tensors_of_the_batch():
    state = {"n": 0}

    def step(m, b):
        state["n"] += 1
        return fit(m, {"x": (b["x"], b["y"])[state["n"] % 2], "y": b["y"]})

    return model(), step


@refused
def count_of_a_class():
    class Counting(nn.Module):
        calls = 0

        def forward(self, x):
            Counting.calls += 1
            return x * (1.0 if Counting.calls < 4 else 0.5)

    return model(Counting()), fit


@refused
def count_on_one_line():
    class Counting(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1; return x * (1.0 if self.calls < 4 else 0.5)  # fmt: skip # noqa: E702

    return model(Counting()), fit


@refused
def count_in_a_default_argument():
    def step(m, b, calls=[0]):  # noqa: B006
        calls[0] += 1
        return fit(m, b) * (1.0 if calls[0] < 4 else 0.5)

    return model(), step


@refused
def count_around_a_function_that_the_step_calls():
    calls = 0

    def counted():
        nonlocal calls
        calls += 1
        return calls

    return model(), lambda m, b: fit(m, b) * (1.0 if counted() < 4 else 0.5)


@refused
def count_in_slots():
    class Counter:
        __slots__ = ("n",)

        def __init__(self):
            self.n = 0

    counter = Counter()

    def step(m, b):
        counter.n += 1
        return fit(m, b) * (1.0 if counter.n < 4 else 0.5)

    return model(), step


@refused
def flag_that_is_turned():
    state = {"on": False}

    def step(m, b):
        state["on"] = not state["on"]
        return fit(m, b) * (1.0 if state["on"] else 0.5)

    return model(), step


@refused
def length_of_a_list_that_grows():
    history = []

    def step(m, b):
        loss = fit(m, b)
        history.append(loss.item())
        return loss * (1.0 if len(history) < 40 else 0.5)

    return model(), step


@refused
def number_given_to_a_new_tensor():
    counted = itertools.count(1)
    return model(), lambda m, b: fit(m, b) * torch.tensor(float(next(counted)))


@refused
def loss_that_is_compared_with_those_before():
    history = collections.deque(maxlen=20)

    def step(m, b):
        loss = fit(m, b)
        value = loss.item()
        if len(history) == 20 and value > 3 * sum(history) / len(history):
            loss = loss * 0
        history.append(value)
        return loss

    return model(), step


@refused
def loss_that_is_compared_with_the_last_one_of_an_object():
    class Guarded:
        def __init__(self):
            self.history = []

        def __call__(self, m, b):
            loss = fit(m, b)
            value = float(loss.detach().numpy())
            if self.history and value > 0.9 * max(self.history):
                loss = loss * 0.5
            self.history.append(value)
            return loss

    return model(), Guarded()


@refused
def factor_that_is_the_mean_of_losses_before():
    history = collections.defaultdict(list)

    def step(m, b):
        loss = fit(m, b)
        factor = 1 / numpy.mean(history["loss"]) if history["loss"] else 1.0
        history["loss"].append(loss.item())
        return loss * factor

    return model(), step


@refused
def count_of_losses_that_were_no_better():
    state = {"best": 1e9, "bad": 0}

    def step(m, b):
        loss = fit(m, b)
        if loss.item() < state["best"]:
            state.update(best=loss.item(), bad=0)
        else:
            state["bad"] += 1
        return loss * (0.1 if state["bad"] > 3 else 1.0)

    return model(), step


@refused
def number_of_right_answers_that_is_compared_with_the_last_one():
    history = []

    def step(m, b):
        right = (m(b["x"]) > 0).sum().item()
        loss = fit(m, b) * (0.5 if history and right > history[-1] else 1.0)
        history.append(right)
        return loss

    return model(), step


@refused
def tensor_of_the_step_before():
    history = []

    def step(m, b):
        loss = fit(m, b)
        if history and loss.detach() > 3 * history[-1]:
            loss = loss * 0.5
        history.append(loss.detach())
        return loss

    return model(), step


@right
def losses_that_are_only_kept():
    history = collections.deque(maxlen=3)

    def step(m, b):
        loss = fit(m, b)
        history.append(loss.item())
        return loss * (0.5 if loss.item() > 0.3 else 1.0)

    return model(), step


@right
def table_that_depends_on_no_value_of_the_batch():
    tables = {}

    def step(m, b):
        x = b["x"]
        if x.shape not in tables:
            tables[x.shape] = torch.ones_like(x) + torch.arange(x.shape[0]).to(x.dtype)[:, None]
        return (m(x) * tables[x.shape]).mean()

    return model(), step


@right
def clock_that_is_only_kept():
    times = []

    def step(m, b):
        began = time.perf_counter()
        loss = fit(m, b)
        times.append(time.perf_counter() - began)
        return loss

    return model(), step


@right
def count_that_is_only_kept():
    state = {"n": 0, "loss": 0.0}

    def step(m, b):
        state["n"] += 1
        loss = fit(m, b)
        state["loss"] = loss.item()
        return loss

    return model(), step


@right
def flag_that_the_first_call_sets():
    class Set(nn.Module):
        def __init__(self):
            super().__init__()
            self.ready, self.factor = False, 1.0

        def forward(self, x):
            if not self.ready:
                self.factor, self.ready = 2.0, True
            return x * self.factor

    return model(Set()), fit


@right
def table_that_a_cached_function_returns():
    @functools.lru_cache
    def table(size):
        return torch.arange(size, dtype=torch.float32)

    return model(), lambda m, b: fit(m, b) * table(4).sum()


@pytest.mark.filterwarnings("ignore:.*the step writes", "ignore:.*sets a variable")
@pytest.mark.parametrize("make", refused.values(), ids=list(refused))
def test_python_state_that_changes_the_operators_of_a_second_run_is_refused_with_its_line(make):
    with pytest.raises(RequestError) as refusal:
        captured(*make())
    assert names_a_line(str(refusal.value), __file__)


@pytest.mark.filterwarnings("ignore:.*the step writes", "ignore:.*sets a variable")
@pytest.mark.parametrize("make", right.values(), ids=list(right))
def test_python_state_that_changes_no_operator_is_accepted(make):
    assert captured(*make()).outputs.loss


FILES = {
    "text": lambda path: float(path.read_text()),
    "exists": lambda path: 2.0 if os.path.exists(path) else 1.0,
    "is_file": lambda path: 2.0 if path.is_file() else 1.0,
    "listdir": lambda path: len(os.listdir(path.parent)),
    "glob": lambda path: len(list(path.parent.glob("*"))),
    "size": lambda path: path.stat().st_size,
    "access": lambda path: 1.0 + os.access(path, os.R_OK),
}


@pytest.mark.parametrize("read", FILES.values(), ids=list(FILES))
def test_a_file_that_the_step_reads_or_looks_for_is_refused_with_its_line(tmp_path, read):
    path = tmp_path / "factor"
    path.write_text("1.0")

    def step(m, b):
        return fit(m, b) * read(path)

    with pytest.raises(RequestError, match="it reads a file") as refusal:
        captured(model(), step)
    assert names_a_line(str(refusal.value), __file__)


def test_a_step_that_creates_a_folder_is_accepted(tmp_path):
    def step(m, b):
        os.makedirs(tmp_path / "new", exist_ok=True)
        return fit(m, b)

    assert captured(model(), step).outputs.loss


@pytest.mark.parametrize("repeats", [True, False])
def test_step_with_repeats_given_is_not_run_twice(repeats):
    numbers = itertools.count()

    def step(m, b):
        return fit(m, b) * next(numbers)

    with nullcontext() if repeats else pytest.raises(RequestError, match="something else"):
        capture_step(model(), step, {"x": torch.randn(2, 4)}, repeats=repeats)


def test_trial_runs_restore_counters():
    state = types.SimpleNamespace(nested=types.SimpleNamespace(n=0))

    class Counter:
        __slots__ = ("n",)

        def __init__(self):
            self.n = 3

    counter = Counter()

    def step(m, b):
        state.nested.n += 1
        counter.n += 1
        return fit(m, b)

    with pytest.warns(UserWarning, match="the step writes"):
        captured(model(), step)
    assert (state.nested.n, counter.n) == (0, 3)


def test_lru_cache_of_the_user_keeps_no_traced_tensor():
    @functools.lru_cache
    def table(size):
        return torch.arange(size, dtype=torch.float32)

    captured(model(), lambda m, b: fit(m, b) * table(4).sum())
    assert type(table(4)) is torch.Tensor
    assert table(4).sum() == 6


def doubled_by_the_length(loss):
    return loss * 2 if len(f"loss {loss.item():.3f}") > 10 else loss


def doubled_if_the_text_has_nan(loss):
    return loss * 2 if "nan" in f"loss {loss.item()}" else loss


def factor_by_the_text(loss):
    return loss * {"loss 1.00": 2.0}.get("loss {:.2f}".format(loss.item()), 1.0)  # noqa: UP032


def factor_by_the_number_of_digits(loss):
    return loss * len("%.1f of it" % loss.item())  # noqa: UP031


@pytest.mark.parametrize("use", [
    doubled_by_the_length, doubled_if_the_text_has_nan, factor_by_the_text, factor_by_the_number_of_digits,
])  # fmt: skip
def test_a_text_of_a_value_that_decides_what_is_computed_is_refused_with_the_line(use):
    """Also where the text is joined to others, so that it is a plain text."""
    try:
        step = captured(model(), lambda m, b: use(fit(m, b)))
    except RequestError as refusal:
        said = str(refusal)
        assert names_a_line(said, __file__)
        assert "use the tensor itself in the condition" in said
    else:
        assert step.regions  # the line stays Python, and reads the text of the value


def test_texts_of_values_that_are_printed_and_kept_are_captured(capsys):
    texts = []

    def step(m, b):
        loss = fit(m, b)
        print(f"loss {loss.item():.3f} of {loss.detach() * 2:.1f}".center(40))
        texts.append(f"loss {loss.item():.3f}")
        return loss

    with pytest.warns(UserWarning, match="the step writes 'texts'"):
        assert not captured(model(), step).regions


def test_trial_runs_are_few_even_where_a_step_counts_collects_and_compares(monkeypatch):
    runs, run = [], trial_runs.TrialRuns.run
    monkeypatch.setattr(trial_runs.TrialRuns, "run", lambda *given, **more: runs.append(1) or run(*given, **more))
    state = {"n": 0, "losses": [], "ready": False}

    def step(m, b):
        state["n"] += 1
        state["ready"] = True
        loss = fit(m, b)
        state["losses"].append(loss.item())
        return loss

    with pytest.warns(UserWarning, match="the step writes"):
        captured(model(), step)
    assert len(runs) <= MAX_RUNS


def test_max_norm_of_an_embedding_is_refused_with_what_to_do_instead():
    embedding = nn.Sequential(nn.Embedding(10, 4, max_norm=1.0), nn.Linear(4, 4))
    with pytest.raises(RequestError, match=r"max_norm= writes parameter '0.weight'.*pipe.on_parameters") as refusal:
        capture_step(embedding, lambda m, b: m(b["x"]).square().mean(), {"x": torch.randint(0, 10, (4, 2))})
    assert names_a_line(str(refusal.value), __file__)
