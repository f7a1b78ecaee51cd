"""Numbers that a step keeps in Python: allowed where they only reach texts and Python objects, refused otherwise."""

import logging
import math
import time
import warnings

import pytest
import torch
from panpipe.core.capture.export.step import capture_step
from panpipe.core.errors import RequestError
from torch import nn

LOG = logging.getLogger(__name__)
BATCH = {"x": torch.ones(2, 3)}


def fit(model, batch):
    return model(batch["x"]).square().mean()


class Kept:
    """What a step keeps."""

    def __init__(self, **values):
        vars(self).update(values)


def bar():
    s = Kept(n=0, total=5, post={})

    def step(m, b):
        loss = fit(m, b)
        s.n += 1
        if s.n % 10 == 0:
            print(f"{s.n}/{s.total} {loss.item():.3f}")
        s.post = {"part": s.n / s.total}
        return loss

    return nn.Linear(3, 1), step


def timer():
    class Timer:
        def __init__(self):
            self.begun, self.total = 0.0, 0.0

        def __enter__(self):
            self.begun = time.perf_counter()

        def __exit__(self, *_error):
            self.total = self.total + time.perf_counter() - self.begun
            LOG.info("%.1f s", self.total)

    timed = Timer()

    def step(m, b):
        with timed:
            return fit(m, b)

    return nn.Linear(3, 1), step


def meter():
    s = Kept(sum=0.0, n=0)

    def step(m, b):
        loss = fit(m, b)
        s.sum += loss.item() * len(b["x"])
        s.n += len(b["x"])
        print(f"mean {s.sum / max(s.n, 1):.3f}")
        return loss

    return nn.Linear(3, 1), step


def variable():
    mean = 0.0

    def step(m, b):
        nonlocal mean
        loss = fit(m, b)
        mean = 0.9 * mean + 0.1 * loss.item()
        print(mean)
        return loss

    return nn.Linear(3, 1), step


def item_of_a_list():
    seen = [0]

    def step(m, b):
        seen[0] += 1
        if seen[0] % 3 == 0:
            print("%d steps" % seen[0])  # noqa: UP031 - as a user may write it
        return fit(m, b)

    return nn.Linear(3, 1), step


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.calls, self.mean = nn.Linear(3, 1), 0, 0.0

    def forward(self, x):
        self.calls += 1
        if self.calls % 100 == 0 and self.calls > 500:
            print(self.calls)
        found = self.inner(x)
        self.mean = 0.9 * self.mean + 0.1 * found.mean().item()
        print(f"{self.mean:.2f}")
        return found


def attributes_of_a_module():
    return Counting(), fit


@pytest.mark.parametrize("case", [bar, timer, meter, variable, item_of_a_list, attributes_of_a_module])
def test_number_that_only_reaches_texts_is_kept_with_a_warning(case, capsys):
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        capture_step(*case(), BATCH)
    assert any("a captured step " in str(each.message) for each in given)
    assert capsys.readouterr().out == ""


def multiplied_every_50_steps():
    s = {"n": 0}

    def step(m, b):
        s["n"] += 1
        return fit(m, b) * (2.0 if s["n"] % 50 == 0 else 1.0)

    return nn.Linear(3, 1), step


def factor_set_after_100_steps():
    s = Kept(n=0, factor=1.0)

    def step(m, b):
        loss = fit(m, b) * s.factor
        s.n += 1
        if s.n == 100:
            s.factor = 0.5
        return loss

    return nn.Linear(3, 1), step


def factor_by_text():
    s, factors = Kept(n=0), {str(i): 1.0 + i for i in range(2000)}

    def step(m, b):
        s.n += 1
        return fit(m, b) * factors[f"{s.n}"]

    return nn.Linear(3, 1), step


def factor_by_an_equal_text():
    s = Kept(n=0)

    def step(m, b):
        s.n += 1
        return fit(m, b) * (2.0 if f"{s.n}" == "17" else 1.0)

    return nn.Linear(3, 1), step


def factor_by_a_joined_text():
    s, factors = Kept(n=0), {f"factor {i}": 1.0 + i for i in range(2000)}

    def step(m, b):
        s.n += 1
        return fit(m, b) * factors.get(f"factor {s.n}", 1.0)

    return nn.Linear(3, 1), step


def module_by_a_joined_name():
    s = Kept(n=0)

    def step(m, b):
        s.n += 1
        return fit(getattr(m, f"layer{s.n % 2}"), b)

    return nn.ModuleDict({"layer0": nn.Linear(3, 1), "layer1": nn.Linear(3, 1)}), step


def factor_by_a_text_that_is_printed():
    s = Kept(n=0)

    def step(m, b):
        s.n += 1
        text = str(s.n)
        print(text)
        return fit(m, b) * (2.0 if text.endswith("7") else 1.0)

    return nn.Linear(3, 1), step


def factor_by_a_formatted_text():
    s = Kept(n=0)

    def step(m, b):
        s.n += 1
        return fit(m, b) * (2.0 if "%d" % s.n == "17" else 1.0)  # noqa: UP031 - the conversion is the subject

    return nn.Linear(3, 1), step


def factor_by_a_float():
    s = Kept(n=0)

    def step(m, b):
        s.n += 1
        return fit(m, b) * (math.sqrt(s.n) if float(s.n) % 17 == 0 else 1.0)

    return nn.Linear(3, 1), step


def weight_by_the_losses_before():
    s = Kept(mean=0.0)

    def step(m, b):
        loss = fit(m, b)
        weight = 1 / (1 + s.mean)
        s.mean = 0.9 * s.mean + 0.1 * loss.item()
        return loss * weight

    return nn.Linear(3, 1), step


def loss_of_the_step_before():
    s = Kept(last=1.0)

    def step(m, b):
        loss, last = fit(m, b), s.last
        s.last = loss.item()
        return loss * last

    return nn.Linear(3, 1), step


def index_by_a_count():
    s = Kept(n=0)

    def step(m, b):
        s.n = (s.n + 1) % 3
        return fit(m, {"x": b["x"][:, s.n :]}) if s.n == 7 else fit(m, b) + b["x"][0, s.n] * m.bias.sum()

    return nn.Linear(3, 1), step


def many_conditions():
    s = Kept(n=0)

    def step(m, b):
        s.n += 1
        for i in range(20):
            if s.n == i:
                print(i)
        return fit(m, b)

    return nn.Linear(3, 1), step


@pytest.mark.parametrize(
    "case",
    [multiplied_every_50_steps, factor_set_after_100_steps, factor_by_text, factor_by_a_float,
     factor_by_an_equal_text, factor_by_a_joined_text, module_by_a_joined_name, factor_by_a_text_that_is_printed,
     factor_by_a_formatted_text,
     weight_by_the_losses_before, loss_of_the_step_before, index_by_a_count, many_conditions],
)  # fmt: skip
def test_number_that_may_reach_a_tensor_is_refused_with_its_line(case):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(
            RequestError, match=r"test_kept_number_runs.py:\d+: .*(the Python of a captured step runs only once)"
        ):
            capture_step(*case(), BATCH)
