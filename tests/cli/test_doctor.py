"""``panpipe doctor``: what it says of models that train, that keep some Python, that differ, and that cannot be cut."""

import json
import re
import textwrap

import pytest
from panpipe.cli import main

MODELS = """
    import itertools

    import torch
    from torch import nn

    class Halting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x) if x.mean() > 0 else x  # BRANCH

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.calls = nn.Linear(4, 4), 0

        def forward(self, x):
            self.calls += 1
            return self.linear(x) * self.calls  # COUNT

    class Iterating(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.factors = nn.Linear(4, 4), itertools.count(1)

        def forward(self, x):
            return self.linear(x) * next(self.factors)

    class Remembering(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
            self.register_buffer("seen", torch.zeros(4))

        def forward(self, x):
            x = x + self.seen
            for layer in self.layers:
                x = layer(x).tanh()
            self.seen.add_(x.detach().mean(0))
            return x

    def step(model, batch):
        return model(batch).pow(2).mean()

    def penalised(model, batch):
        batch = batch.clone().requires_grad_()
        return torch.autograd.grad(model(batch).sum(), batch, create_graph=True)[0].norm()

    def made(*middle):
        torch.manual_seed(0)
        layers = nn.Linear(4, 4), nn.Dropout(0.5), *middle, nn.Tanh(), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Tanh()
        return nn.Sequential(*layers), step, torch.randn(6, 4)

    def sound(): return made()
    def halting(): return made(Halting())
    def counting(): return made(Counting())
    def iterating(): return made(Iterating())
    def remembering(): return made(Remembering())
    def differentiating(): return made()[0], penalised, torch.randn(6, 4)
    def short(): return nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]), step, torch.randn(2, 4)
"""


@pytest.fixture(autouse=True)
def models(tmp_path, monkeypatch):
    name = f"models_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(MODELS), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return name


def examined(capsys, *arguments):
    status = main(["doctor", *arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_a_sound_model_is_healthy_by_every_plan(models, capsys):
    status, found = examined(capsys, f"{models}:sound")
    assert status == 0
    assert found["healthy"]
    assert found["dtype"] == "float64"
    assert [(check["devices"], check["schedule"]) for check in found["checks"]] == [
        (devices, schedule) for devices in (2, 3) for schedule in ("1f1b", "v-half")
    ]
    for check in found["checks"]:
        assert check["right"]
        assert all(check[kind] < 1e-12 for kind in ("loss", "gradient", "parameter", "buffer"))


def test_doctor_names_untraced_regions_with_their_lines(models, capsys):
    assert main(["doctor", f"{models}:halting", "--devices", "2"]) == 0
    said = capsys.readouterr().out
    line = MODELS.splitlines().index("            return self.linear(x) if x.mean() > 0 else x  # BRANCH") + 1
    assert "module '2' remains Python code, on one stage: " in said
    assert f"{models}.py:{line} in forward: bool needs the value of a tensor" in said
    assert "torch.where" in said
    assert "trains as one process does" in said


def test_doctor_reports_a_model_with_other_results(models, capsys):
    """Its forward advances an iterator: capture reads one value, as the user's code is trusted to repeat itself."""
    assert main(["doctor", f"{models}:iterating", "--devices", "2"]) == 1
    said = capsys.readouterr().out
    assert "DIFFERS" in said
    assert "1f1b on 2 devices differs most in " in said
    assert "does not train as one process does" in said


def test_doctor_names_operators_that_cannot_be_cut(models, capsys):
    status, found = examined(capsys, f"{models}:remembering", "--devices", "2")
    (piece,) = found["uncut"]
    assert status == 0
    assert piece["share"] > 0.5
    assert f"{models}.py:" in piece["line"]


def test_doctor_reports_fewer_operators_than_stages_and_judges_by_the_other_plans(models, capsys):
    status, found = examined(capsys, f"{models}:sound", "--devices", "7")
    assert status == 0
    assert found["healthy"]
    assert "14 stages for" in found["checks"][1]["problem"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{}:differentiating"], r"in penalised: .*differentiates here.*move this call.* into that module's forward"),
        (["{}"], "is not a model: write module:factory"),
        (["{}:nothing"], "has no function 'nothing'"),
        (["{}:sound", "--devices", "0"], "--devices is '0': give at least 1"),
        (["{}:sound", "--quickly"], "No such option"),
        ([], "Missing argument"),
    ],
)
def test_doctor_refuses_wrong_requests_in_one_line(models, capsys, arguments, said):
    assert main(["doctor", *(argument.format(models) for argument in arguments)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert re.search(said, error), error


def test_a_batch_of_few_rows_is_cut_into_fewer_microbatches(models, capsys):
    status, _ = examined(capsys, f"{models}:short", "--devices", "2")
    assert status == 0
