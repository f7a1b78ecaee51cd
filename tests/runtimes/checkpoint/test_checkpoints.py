"""Training that stops and resumes, under the same plan and under others, equals uninterrupted training."""

import copy
import functools
import re
from pathlib import Path

import panpipe
import pytest
import torch
import torch.distributed.checkpoint as dcp
from panpipe.runtimes.checkpoint.checkpoints import export_checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import lr_scheduler

from ...support.cuts import captured, even_plan
from ...support.launch import results, torchrun_script
from ...support.models import CASES, Case
from ...support.programs.optimizing import F32, everything, pipe_of, train, two_groups, warm_up
from ...support.training import unequal

GPT, CONV = "tied gpt with dropout", "batchnorm with a skip"
EXAMPLE = Path(__file__).parents[3] / "examples" / "resume.py"
OTHERS = [{}, {"devices": 3}, {"schedule_name": "v-half", "chunks": 2}]


@functools.cache
def unbroken(name, steps=4):
    """Losses, rates and all tensors of training that never stops."""
    pipe = pipe_of(name, scheduler=warm_up)
    return train(pipe, name, steps), pipe.metrics.learning_rates, everything(pipe)


@pytest.mark.parametrize("stop", [0, 2])
@pytest.mark.parametrize("name", [GPT, CONV])
def test_resumed_training_has_the_bits_of_uninterrupted_training(name, stop, tmp_path):
    first = pipe_of(name, scheduler=warm_up)
    losses = train(first, name, stop)
    first.checkpoint(tmp_path / "a")
    second = pipe_of(name, scheduler=warm_up, seed=8, model=CASES[name].model(F32).requires_grad_())
    train(second, name, 1)  # what it has is replaced
    second.resume(tmp_path / "a")
    assert (second.metrics.steps, second.metrics.updates) == (stop, stop)
    losses += train(second, name, 4 - stop)
    assert losses == unbroken(name)[0]
    assert second.metrics.learning_rates == unbroken(name)[1]
    assert unequal(everything(second), unbroken(name)[2]) == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("cut", OTHERS[1:])
@pytest.mark.parametrize("name", [GPT, CONV])
def test_torch_dcp_loads_a_checkpoint_under_another_plan(name, cut, tmp_path):
    first = pipe_of(name, scheduler=warm_up)
    losses = train(first, name, 2)
    dcp.save({"pipe": first}, checkpoint_id=tmp_path / "a")
    second = pipe_of(name, scheduler=warm_up, seed=8, **cut)
    dcp.load({"pipe": second}, checkpoint_id=tmp_path / "a")
    assert losses + train(second, name, 2) == pytest.approx(unbroken(name)[0], rel=1e-6)
    assert second.metrics.learning_rates == unbroken(name)[1]
    torch.testing.assert_close(everything(second), unbroken(name)[2], rtol=1e-4, atol=1e-6)


def test_load_state_dict_copies_tensors_and_keeps_copies_of_tied_weights_equal():
    first, second = pipe_of(GPT), pipe_of(GPT, 3, seed=8)
    train(first, GPT, 2)
    second.load_state_dict(first.state_dict())
    before = everything(first)
    wanted = train(first, GPT, 0) or train(pipe_copy(first), GPT, 2)
    assert train(second, GPT, 2) == pytest.approx(wanted, rel=1e-6)
    assert unequal(everything(first), before) == []
    copies = [own["embedding.weight"] for own in second._session.stage_parameters.values() if "embedding.weight" in own]
    states = [o.state[c] for o, c in zip((second.optimizers[0], second.optimizers[2]), copies, strict=True)]
    assert torch.equal(*copies)
    assert torch.equal(*(state["exp_avg"] for state in states))
    assert states[0]["exp_avg"].data_ptr() != states[1]["exp_avg"].data_ptr()


def pipe_copy(pipe):
    """Another pipeline that continues from the same state."""
    found = pipe_of(GPT, seed=9)
    found.load_state_dict(copy.deepcopy(pipe.state_dict()))
    return found


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoint_is_exchanged_with_plain_torch_in_both_directions(tmp_path):
    pipe, options = pipe_of(CONV), StateDictOptions(flatten_optimizer_state_dict=True)
    train(pipe, CONV, 2)
    pipe.checkpoint(tmp_path / "a")
    model = CASES[CONV].model(F32)
    optimizer = two_groups(model.named_parameters())
    plain = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
    assert set(plain["optimizer"]) == set(pipe.state_dict()["optimizer"])
    export_checkpoint(tmp_path / "a", tmp_path / "dcp")
    dcp.load({"pipe": plain}, checkpoint_id=tmp_path / "dcp")
    set_model_state_dict(model, plain["model"])
    set_optimizer_state_dict(model, optimizer, plain["optimizer"], options=options)
    mine = {n: p.detach() for n, p in pipe._session.model.named_parameters()}
    assert unequal({n: p.detach() for n, p in model.named_parameters()}, mine) == []
    kept = {n: optimizer.state[p]["exp_avg_sq"] for n, p in model.named_parameters()}
    wanted = {n: everything(pipe)[f"state.{n}.exp_avg_sq"] for n in kept}
    assert unequal(kept, wanted) == []
    with pytest.raises(panpipe.RequestError, match=r"a checkpoint of torch\.distributed\.checkpoint, whose metadata"):
        pipe.resume(tmp_path / "dcp")
    same = pipe_of(CONV, seed=8)
    dcp.load({"pipe": same}, checkpoint_id=tmp_path / "dcp")
    same.checkpoint(tmp_path / "back")
    same.resume(tmp_path / "back")
    assert unequal(everything(same), everything(pipe)) == []
    assert train(same, CONV, 1) == train(pipe, CONV, 1)


def test_checkpoint_of_parameters_without_gradient_and_frozen_ones(tmp_path):
    """One that the loss does not depend on is never stepped; its state is none afterwards, too."""

    def model(frozen=True):
        torch.manual_seed(0)
        made = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
        made.register_parameter("unread", torch.nn.Parameter(torch.ones(2)))
        made[0].weight.requires_grad_(not frozen)
        return made

    def step(model, x):
        return model(x).pow(2).mean()

    def pipe(**given):
        case = Case(lambda dtype: model(**given), step, lambda rows, dtype: torch.ones(rows, 4))
        plan = even_plan(captured(case, F32, 4, 2), 2, 2)
        with pytest.warns(UserWarning, match="unread: the loss does not depend on it"):
            return panpipe.pipeline(model(**given), step, torch.ones(4, 4), plan=plan, optimizer=torch.optim.AdamW)

    first = pipe()
    first.step(torch.ones(4, 4))
    first.checkpoint(tmp_path / "a")
    second = pipe()
    with torch.no_grad():
        second._session.model.get_parameter("unread").zero_()
        second._session.model.get_parameter("0.weight").zero_()
    second.resume(tmp_path / "a")
    assert unequal(everything(second), everything(first)) == []
    assert first.step(torch.ones(4, 4)) == second.step(torch.ones(4, 4))
    with pytest.raises(panpipe.RequestError, match=r"has no 'optimizer\.state\.0\.weight\..*, which the pipeline has"):
        pipe(frozen=False).resume(tmp_path / "a")


def test_state_of_a_parameter_that_is_frozen_since_is_resumed(tmp_path):
    pipe = pipe_of(CONV)
    train(pipe, CONV, 1)
    name, parameter = next((n, p) for n, p in pipe._session.model.named_parameters() if p.requires_grad)
    parameter.requires_grad_(False)
    train(pipe, CONV, 1)
    pipe.checkpoint(tmp_path / "a")
    before = everything(pipe)
    train(pipe, CONV, 1)
    pipe.resume(tmp_path / "a")
    assert unequal(everything(pipe), before) == []
    assert any(key.startswith(f"state.{name}.") for key in pipe.state_dict()["optimizer"])


def test_scheduler_counters_survive_a_resume(tmp_path):
    """MultiStepLR keeps numbers as keys, which become texts where a checkpoint looks into them."""
    steps = functools.partial(lr_scheduler.MultiStepLR, milestones=[1, 3], gamma=0.5)
    first = pipe_of(CONV, scheduler=steps)
    train(first, CONV, 2)
    first.checkpoint(tmp_path / "a")
    second = pipe_of(CONV, scheduler=steps)
    second.resume(tmp_path / "a")
    train(second, CONV, 1)
    assert second.metrics.learning_rates == [1e-2 / 4, 5e-3 / 4]


def test_scaler_is_resumed_and_skipped_updates_do_not_step_the_scheduler(tmp_path):
    def pipe(**options):
        scaler = torch.amp.GradScaler("cpu", **{"growth_interval": 1, **options})
        return pipe_of(CONV, scaler=scaler, scheduler=warm_up)

    first, batch = pipe(init_scale=2.0**120), CASES[CONV].batch(8, F32)
    before = first.metrics.learning_rates
    first.step({**batch, "x": 1e6 * batch["x"]})
    assert first.metrics.skipped
    assert first.metrics.learning_rates == before
    first.step(batch)
    assert (first.metrics.steps, first.metrics.updates) == (2, 1)
    assert first.metrics.learning_rates == [2 * rate for rate in before]
    first.checkpoint(tmp_path / "a")
    second = pipe(init_scale=4.0)
    second.resume(tmp_path / "a")
    assert second._session.trainer.training.scaler.get_scale() == first._session.trainer.training.scaler.get_scale() > 4
    assert (second.metrics.steps, second.metrics.updates) == (first.metrics.steps, 1)
    with refusal("no 'scaler', which the pipeline has: leave scaler= out"):
        second.load_state_dict(pipe_of(CONV, scheduler=warm_up).state_dict())


# What is refused


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A checkpoint of a pipeline with two groups of AdamW and no schedule."""
    folder = tmp_path_factory.mktemp("written") / "a"
    pipe = pipe_of(CONV)
    train(pipe, CONV, 1)
    pipe.checkpoint(folder)
    return folder


def plain_adam(named):
    return torch.optim.Adam([p for _, p in named])


def momentum(value):
    return lambda named: torch.optim.SGD(named, lr=0.1, momentum=value)


def refusal(said):
    return pytest.raises(panpipe.RequestError, match=rf"\A[^\n]*{said}[^\n]*\Z")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"optimizer": plain_adam}, "of the optimizer AdamW and the pipeline has Adam"),
        ({"scheduler": warm_up}, "no 'scheduler', which the pipeline has: leave scheduler= out"),
        (
            {"optimizer": torch.optim.AdamW},
            "'.*' has .* in the checkpoint and '.*' has .* parameter group",
        ),
        (
            {"optimizer": lambda n: torch.optim.AdamW(n, amsgrad=True)},
            "no 'optimizer.state.*.max_exp_avg_sq' and .* more, which the pipeline has: it is of another optimizer",
        ),
    ],
)
def test_files_that_are_no_checkpoint_are_refused(written, options, said):
    pipe = pipe_of(CONV, **options)
    before = everything(pipe)
    with refusal(said):
        pipe.resume(written)
    if "parameter group" not in said:
        assert unequal(everything(pipe), before) == []


def test_checkpoint_of_another_model_is_refused(written):
    pipe = pipe_of(GPT)
    with refusal("no 'model.embedding.weight' and .* more, which .*: it is a checkpoint of another model"):
        pipe.resume(written)
    state = pipe_of(CONV).state_dict()
    wide = pipe_of(CONV)
    state["model"]["head.bias"] = torch.zeros(5)
    with refusal(r"'model.head.bias' has the shape \(5,\) in the checkpoint and \(3,\) in the pipeline"):
        wide.load_state_dict(state)
    state["model"] = {**wide.state_dict()["model"], "tail.bias": torch.zeros(3)}
    with refusal("has 'model.tail.bias', which the pipeline does not have: it is a checkpoint of another model"):
        wide.load_state_dict(state)
    with refusal("this is no state of a pipeline"):
        wide.load_state_dict(wide._session.model.state_dict())


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ({"optimizer": None}, {}, "has no 'optimizer.state.*, which the pipeline has: it is of another .*; train with"),
        (
            {"optimizer": momentum(0.9)}, {"optimizer": momentum(0)},
            "has '.*.momentum_buffer', which the pipeline does not have: it is of another optimizer",
        ),
        (
            {"scheduler": warm_up}, {"scheduler": lambda o: lr_scheduler.StepLR(o, 1)},
            "of the scheduler SequentialLR and the pipeline has StepLR",
        ),
    ],
)  # fmt: skip
def test_checkpoint_of_another_optimizer_or_scheduler_is_refused(tmp_path, first, second, said):
    pipe = pipe_of(CONV, **first)
    train(pipe, CONV, 1)
    pipe.checkpoint(tmp_path / "a")
    with refusal(said):
        pipe_of(CONV, **second).resume(tmp_path / "a")


def test_checkpoint_with_accumulated_gradients_is_refused(tmp_path):
    pipe = pipe_of(CONV)
    pipe.step(CASES[CONV].batch(8, F32), update=False)
    with refusal("gradients wait for an update"):
        pipe.checkpoint(tmp_path / "a")
    assert not (tmp_path / "a").exists()
    pipe.step(CASES[CONV].batch(8, F32))
    pipe.checkpoint(tmp_path / "a")


def test_unusable_checkpoint_folders_are_refused(written, tmp_path):
    pipe = pipe_of(CONV)
    with refusal(f"there is no whole checkpoint in '{re.escape(str(tmp_path))}'"):
        pipe.resume(tmp_path)
    with refusal("holds a checkpoint: a job that dies while it is overwritten"):
        pipe.checkpoint(written)
    (tmp_path / "file").touch()
    with refusal("file/a' cannot be written: .*; give a folder"):
        pipe.checkpoint(tmp_path / "file" / "a")
    with refusal("file' is a file: a checkpoint is a folder"):
        pipe.checkpoint(tmp_path / "file")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes").touch()
    with refusal("used' has other files: a checkpoint has a folder of its own"):
        pipe.checkpoint(tmp_path / "used")
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(b"a pickle")
    with refusal("dcp' is a checkpoint of torch.distributed.checkpoint, .*if you trust it, read it with"):
        pipe.resume(tmp_path / "dcp")
    with refusal("folder is None: give the folder of a checkpoint"):
        pipe.resume(panpipe.latest_checkpoint(tmp_path / "none"))


# Over ranks


def on_ranks(folder, stop, ranks, **mesh):
    """A job over gloo that resumes from the folder and trains up to a step. Returns what each rank reports."""
    return results("resumed", folder, ranks, STOP=str(stop), **mesh)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "mesh"), [(2, None), (3, None), (4, "pp=2,dp=2")])
def test_ranks_resume_a_checkpoint_of_two_ranks(tmp_path, ranks, mesh):
    """Also as a pipeline of threads. With the same plan to the last bit; BatchNorm goes by the first replica."""
    stopped = on_ranks(tmp_path, 2, 2)
    assert {one["steps"] for one in stopped} == {2}
    threads = pipe_of(CONV, scheduler=warm_up)
    threads.resume(tmp_path / "a")
    assert train(threads, CONV, 2) == unbroken(CONV)[0][2:]
    assert unequal(everything(threads), unbroken(CONV)[2]) == []
    found = on_ranks(tmp_path, 4, ranks, **({"MESH": mesh} if mesh else {}))
    for one in found:
        assert one["steps"] == 4
        assert one["rates"] == unbroken(CONV)[1]
        assert one["losses"] == found[0]["losses"]
        if mesh is None:
            assert one["losses"] == unbroken(CONV)[0][2:]
            for name, values in one["parameters"].items():
                assert torch.equal(torch.tensor(values), unbroken(CONV)[2][name]), name


@pytest.mark.slow
def test_killed_job_resumes_from_its_last_checkpoint(tmp_path):
    """Ranks of the example die after a checkpoint, torchrun restarts them, and they compute the same numbers."""

    def losses(folder, **environment):
        arguments = ("--folder", str(folder), "--steps", "7", "--every", "2")
        done = torchrun_script(EXAMPLE, *arguments, restarts=2, **environment)
        assert done.returncode == 0, done.stderr[-3000:]
        return [line for line in done.stdout.splitlines() if line.startswith("step")]

    unbroken_lines = losses(tmp_path / "a")
    broken = losses(tmp_path / "b", KILL_AT="3,5")
    assert [line.split(":")[0] for line in broken] == [f"step {i}" for i in (0, 1, 2, 2, 3, 4, 4, 5, 6)]
    assert list(dict.fromkeys(broken)) == unbroken_lines


class Counting(torch.optim.SGD):
    """Keeps state that belongs to no parameter."""

    def step(self, closure=None):
        self.state["count"] = self.state.get("count", 0) + 1
        return super().step(closure)


def test_optimizer_state_without_a_parameter_is_refused(tmp_path):
    pipe = pipe_of(CONV, optimizer=lambda named: Counting(named, lr=0.1))
    pipe.step(CASES[CONV].batch(8, F32))
    with refusal("Counting keeps 'count', which belongs to no parameter"):
        pipe.state_dict()


def test_resumed_pipeline_evaluates_with_the_dropout_of_uninterrupted_training(tmp_path):
    batch = CASES[GPT].batch(8, F32)
    first = pipe_of(GPT)
    drawn = [first.evaluate(batch).item() for _ in range(2)]
    train(first, GPT, 1)
    first.checkpoint(tmp_path / "a")
    unbroken = [first.evaluate(batch).item(), *train(first, GPT, 1), first.evaluate(batch).item()]
    second = pipe_of(GPT, seed=8)
    second.evaluate(batch)  # what it has counted is replaced
    second.resume(tmp_path / "a")
    assert [second.evaluate(batch).item(), *train(second, GPT, 1), second.evaluate(batch).item()] == unbroken
    assert len({*drawn, *unbroken}) == 5
