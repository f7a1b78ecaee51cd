"""Loss scaling for steps in float16: a pipeline does what one process does with torch's own GradScaler."""

import copy

import panpipe
import pytest
import torch
from panpipe.runtimes.update.training import LossScale
from torch import nn

from ...support.models import CASES
from ...support.programs.scaling import TAPPED, Alone, Momentum, Scaler, differences, tapped_batch
from ...support.training import SGD, parameters, pipeline_of, under_autocast, unequal

CONV, GPT, WEIGHTED = (
    under_autocast(CASES[name], torch.float16)
    for name in ("batchnorm with a skip", "tied gpt with dropout", "token-weighted")
)
WIDE = {"init_scale": 2.0**19, "growth_interval": 2}
"""Overflows at first, and again when it has grown."""


def pair(case, devices=2, *, clip_norm=None, plan_options=None, optimizer=Momentum, scaler=None, **options):
    """A pipeline with its scaler, and one process."""
    scaler = WIDE if scaler is None else scaler
    own = Scaler(**scaler)
    pipe, model = pipeline_of(
        case, 8, 4, devices, optimizer=optimizer, clip_norm=clip_norm, plan_options=plan_options, scaler=own, **options
    )
    return pipe, own, Alone(case, model, clip_norm=clip_norm, **scaler)


def together(pipe, scaler, alone, batches):
    """Train both. Returns for each update whether it was skipped, and the scale after it."""
    torch.set_num_threads(1)
    found, before = [], pipe.metrics.updates
    for batch in batches:
        pipe.step(batch)
        skipped = alone.step(batch)
        assert pipe.metrics.skipped is skipped
        assert scaler.state_dict() == alone.scaler.state_dict()
        found.append((pipe.metrics.skipped, scaler.get_scale()))
    assert pipe.metrics.updates - before == [skipped for skipped, _ in found].count(False)
    return found


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        ({}, {}),
        ({"split": True}, {"clip_norm": 0.5}),
        ({"schedule_name": "v-half", "chunks": 2, "recompute": None}, {}),
        ({}, {"simulated": "2xRTX3090"}),
    ],
)
def test_loss_scaling_has_the_bits_of_one_process(plan, options):
    pipe, scaler, alone = pair(CONV, plan_options=plan, **options)
    found = together(pipe, scaler, alone, [CONV.batch(8, torch.float32)] * 6)
    assert {skipped for skipped, _ in found} == {True, False}
    assert found[0] == (True, 2.0**18)
    assert differences(pipe._session.model, alone.model) == []
    assert pipe.metrics.grad_norm == alone.norm


def fused(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


@pytest.mark.parametrize("scheduled", [False, True])
def test_fused_optimizer_skips_overflowing_steps_itself(scheduled):
    """But where a scheduler has to know, too."""
    schedule = {"scheduler": lambda made: torch.optim.lr_scheduler.StepLR(made, 1, 0.5)} if scheduled else {}
    pipe, scaler, alone = pair(CONV, optimizer=fused, **schedule)
    alone.optimizer = fused(alone.model.parameters())
    rates = [1e-3 if not scheduled else 1e-3 * 0.5**steps for steps in range(7)]
    for _ in range(6):
        alone.optimizer.param_groups[0]["lr"] = rates[pipe.metrics.updates]
        together(pipe, scaler, alone, [CONV.batch(8, torch.float32)])
    assert 0 < pipe.metrics.updates < 6
    assert differences(pipe._session.model, alone.model) == []
    for state in pipe._trainer.stages.states.values():
        for name, parameter in state.trained.items():
            kept = state.optimizer.state[parameter]
            assert kept["step"].item() == pipe.metrics.updates, name


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_overflow_in_one_stage_skips_the_step_of_all_stages(stage):
    pipe, scaler, alone = pair(TAPPED, 3, scaler={"init_scale": 2.0**10})
    tap = next(n for n in pipe.plan.stages[stage].parameters if n.startswith("taps."))
    batch, overflowing = tapped_batch(8, torch.float32), tapped_batch(8, torch.float32, int(tap[5:]))
    together(pipe, scaler, alone, [batch])
    before = parameters(pipe._session.model), copy.deepcopy([o.state_dict() for o in pipe.optimizers.values()])
    assert together(pipe, scaler, alone, [overflowing]) == [(True, 2.0**9)]
    assert [n for n, p in pipe._session.model.named_parameters() if not p.grad.isfinite().all()] == [tap]
    assert unequal(parameters(pipe._session.model), before[0]) == []
    for state, kept in zip(pipe._trainer.stages.states.values(), before[1], strict=True):
        assert repr(state.optimizer.state_dict()) == repr(kept)
    assert together(pipe, scaler, alone, [batch])[0][1] == 2.0**9
    assert unequal(parameters(pipe._session.model), before[0]) != []
    assert differences(pipe._session.model, alone.model) == []


@pytest.mark.parametrize("case", [GPT, WEIGHTED])
def test_loss_scaling_of_tied_weights_and_weighted_losses(case):
    """Weights are computed in the forward and scaled there; the reported loss is not scaled."""
    pipe, scaler, alone = pair(case, 3, optimizer=SGD, scaler={"init_scale": 2.0**15}, clip_norm=1.0)
    alone.optimizer = SGD(alone.model.parameters())
    found = []
    while pipe.metrics.updates < 2:
        found += together(pipe, scaler, alone, [case.batch(8, torch.float32)])
    assert pipe.metrics.grad_norm == pytest.approx(alone.norm, rel=1e-4)
    torch.testing.assert_close(parameters(pipe._session.model), parameters(alone.model), rtol=1e-4, atol=1e-5)
    assert all(0 < value < 1 for value in pipe.metrics.values())
    assert {skipped for skipped, _ in found} == ({True, False} if case is WEIGHTED else {False})


def test_scale_does_not_change_while_gradients_accumulate():
    pipe, scaler, alone = pair(TAPPED, scaler={"init_scale": 2.0**10, "growth_interval": 1}, clip_norm=0.1)
    batch, overflowing = tapped_batch(8, torch.float32), tapped_batch(8, torch.float32, 2)
    for first, second in ((batch, batch), (overflowing, batch), (batch, overflowing), (batch, batch)):
        scale = scaler.get_scale()
        pipe.step(first, update=False)
        assert scaler.get_scale() == scale
        pipe.step(second)
        assert alone.step(first, second) is pipe.metrics.skipped
        assert scaler.get_scale() == alone.scaler.get_scale() == (scale / 2 if pipe.metrics.skipped else scale * 2)
    assert (pipe.metrics.steps, pipe.metrics.updates) == (8, 2)
    torch.testing.assert_close(parameters(pipe._session.model), parameters(alone.model))
    pipe.step(batch, update=False)
    scaler.update(1.0)  # in the middle: for the next losses, not for those of the same update
    pipe.step(batch)
    alone.step(batch, batch)
    assert scaler.get_scale() == 2.0
    torch.testing.assert_close(parameters(pipe._session.model), parameters(alone.model))


def test_without_an_optimizer_gradients_are_left_unscaled():
    pipe, scaler, alone = pair(TAPPED, optimizer=None, scaler={"init_scale": 1000.0})
    mine = Momentum(pipe._session.model.parameters())
    for overflow in (None, 1, None):
        batch = tapped_batch(8, torch.float32, overflow)
        pipe.step(batch)
        alone.step(batch)
        if not pipe.metrics.skipped:
            mine.step()
        assert differences(pipe._session.model, alone.model) == []
    assert scaler.get_scale() == alone.scaler.get_scale() == 500.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.complex64])
def test_parameters_that_cannot_be_unscaled_are_refused(dtype):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, dtype=dtype))
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(panpipe.RequestError, match=rf"parameter '1.weight' is {name}: .*torch.autocast") as refusal:
        panpipe.pipeline(
            model, lambda m, b: m(b).sum(), torch.ones(8, 4), microbatches=4, update=panpipe.Update(scaler=Scaler())
        )
    assert "\n" not in str(refusal.value)


def test_a_scaler_that_is_on_another_device_gets_its_overflows_there():
    """As one that scaled losses on a GPU before: its state stays there."""

    class Elsewhere(torch.amp.GradScaler):
        seen = ()

        def scale(self, outputs):
            self.seen += (outputs.device,)
            return torch.tensor(8.0)

        def unscale_(self, optimizer):
            self.seen += tuple(p.grad.device for group in optimizer.param_groups for p in group["params"])

        def update(self, new_scale=None):
            self.seen += ("update",)

    scaler, meta = Elsewhere("cpu"), torch.device("meta")
    scaler._scale = torch.zeros((), device=meta)
    loss_scale = LossScale(scaler)
    assert loss_scale.now() == 8.0
    loss_scale.update(True)
    assert scaler.seen == (meta, meta, "update")


@pytest.mark.cuda
def test_a_scaler_on_a_gpu_is_updated_as_on_the_host():
    scaler = torch.amp.GradScaler("cuda", init_scale=16.0)
    scaler.scale(torch.ones((), device="cuda"))
    loss_scale = LossScale(scaler)
    assert loss_scale.now() == 16.0
    loss_scale.update(True)
    assert loss_scale.now() == 8.0
