"""Losses and norms that are NaN or infinite: raise, skip or warn, and what is reported."""

import logging
import math
import warnings

import panpipe
import pytest
import torch

from ...support.programs.infinite_gradient import ROOT, root_batch
from ...support.programs.poison import LAYERS, POISONED, Skipping, poisoned_batch
from ...support.programs.scaling import TAPPED, Scaler, tapped_batch
from ...support.training import SGD, parameters, pipeline_of, unequal

# A loss that is NaN or infinite: raise, skip or warn, and the microbatch and the stage that are reported.


def trained_stage(pipe, layer):
    """The stage that adds the poison of a layer, in the last operator of its module."""
    return max(s.index for s in pipe.plan.stages if any(n.startswith(f"layers.{layer}.") for n in s.nodes))


def poisoned_pipe(mode, devices=3, **options):
    return pipeline_of(POISONED, 8, 4, devices, optimizer=SGD, on_nonfinite=mode, **options)


def batch_with(layer=None, row=0, value=math.nan):
    return poisoned_batch(8, torch.float32, layer, row, value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("first", [False, True], ids=["later step", "first step"])
def test_error_names_first_stage_and_microbatch_of_values_that_are_not_finite(value, first):
    pipe, _ = poisoned_pipe("raise")
    for layer, row in ((0, 7), (2, 3), (LAYERS - 1, 4)):
        if not first:
            pipe.step(batch_with())
        with pytest.raises(panpipe.NonFiniteError) as found:
            pipe.step(batch_with(layer, row, value))
        assert (found.value.stage, found.value.microbatch) == (trained_stage(pipe, layer), row // 2)
        assert found.value.step == pipe.metrics.steps
        assert "no parameter was updated" in str(found.value)
        assert "\n" not in str(found.value)


def test_poison_in_the_whole_first_batch_is_found_in_spite_of_an_infinite_mask():
    """No microbatch is finite, so that nothing shows which infinities are usual."""
    pipe, _ = poisoned_pipe("raise")
    batch = batch_with()
    batch["poison"][:, 3] = math.nan
    with pytest.raises(panpipe.NonFiniteError, match="and so are 3 more") as found:
        pipe.step(batch)
    assert (found.value.stage, found.value.microbatch) == (trained_stage(pipe, 3), 0)


def test_error_names_leaf_and_parameter_that_are_not_finite():
    pipe, _ = poisoned_pipe("raise")
    with pytest.raises(panpipe.NonFiniteError, match=r"batch\['poison'\] is not finite in this microbatch"):
        pipe.step(batch_with(1, 5))
    weight = dict(pipe._session.model.named_parameters())["layers.4.linear.bias"]
    with torch.no_grad():
        weight[0] = math.nan
    with pytest.raises(panpipe.NonFiniteError, match=r"parameter 'layers.4.linear.bias' is not finite") as found:
        pipe.step(batch_with())
    assert "layers.4.linear.bias" in pipe.plan.stages[found.value.stage].parameters


@pytest.mark.parametrize("mode", ["skip", "raise"])
def test_skipped_step_equals_one_process_that_skips(mode, caplog):
    """Parameters, optimizer and counts are as before; BatchNorm's buffers have what the forward wrote."""
    pipe, model = poisoned_pipe(mode)
    alone = Skipping(model)
    for layer in (None, 3, None, None, 0, None):
        batch = batch_with(layer, 5)
        before = parameters(pipe._session.model), repr([o.state_dict() for o in pipe.optimizers.values()])
        if mode == "raise" and layer is not None:
            with pytest.raises(panpipe.NonFiniteError):
                pipe.step(batch)
        else:
            pipe.step(batch)
        alone.step(batch)
        assert pipe.metrics.skipped is (layer is not None)
        torch.testing.assert_close(parameters(pipe._session.model), parameters(alone.model), rtol=1e-5, atol=1e-6)
        buffers = [
            {n: b.nan_to_num(9.0) for n, b in each.named_buffers()} for each in (pipe._session.model, alone.model)
        ]
        torch.testing.assert_close(*buffers, rtol=1e-5, atol=1e-6)
        if layer is not None:
            assert unequal(parameters(pipe._session.model), before[0]) == []
            assert repr([o.state_dict() for o in pipe.optimizers.values()]) == before[1]
    assert (pipe.metrics.steps, pipe.metrics.updates) == (6, 4)
    reported = [r for r in caplog.records if r.name == "panpipe"]
    assert len(reported) == (2 if mode == "skip" else 0)
    assert all(
        r.levelno == logging.WARNING and (r.rank, r.step) == (0, s) for r, s in zip(reported, (2, 5), strict=False)
    )


def test_update_of_accumulated_gradients_is_skipped_if_one_loss_is_not_finite():
    pipe, _ = poisoned_pipe("skip")
    before = parameters(pipe._session.model)
    pipe.step(batch_with(2), update=False)
    pipe.step(batch_with())
    assert pipe.metrics.skipped
    assert unequal(parameters(pipe._session.model), before) == []
    pipe.step(batch_with(), update=False)
    pipe.step(batch_with())
    assert not pipe.metrics.skipped
    assert pipe.metrics.updates == 1
    assert all(p.isfinite().all() for p in pipe._session.model.parameters())


def test_error_drops_accumulated_gradients():
    pipe, _ = poisoned_pipe("raise")
    pipe.step(batch_with(), update=False)
    with pytest.raises(panpipe.NonFiniteError):
        pipe.step(batch_with(4), update=False)
    pipe.step(batch_with())
    plain, _ = poisoned_pipe("raise")
    plain._session.trainer.state.steps = 2
    plain.step(batch_with())
    assert unequal(parameters(pipe._session.model), parameters(plain._session.model)) == []


def test_warning_is_issued_once_in_a_row_and_training_goes_on():
    pipe, _ = poisoned_pipe("warn")
    with pytest.warns(
        RuntimeWarning, match="the loss of step 1 is nan: microbatch 1 is not finite.* the update was made"
    ):
        pipe.step(batch_with(3, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe.step(batch_with())
    assert pipe.metrics.updates == 2
    assert not pipe.metrics.skipped


@pytest.mark.parametrize("mode", ["skip", "warn"])
def test_scaler_skips_and_scales_by_gradients_alone(mode):
    scaler = Scaler(init_scale=2.0**10)
    pipe, _ = pipeline_of(TAPPED, 8, 4, optimizer=SGD, on_nonfinite=mode, scaler=scaler)
    pipe.step(tapped_batch(8, torch.float32, 1))  # gradients overflow, and the loss is finite
    assert (pipe.metrics.skipped, scaler.get_scale()) == (True, 2.0**9)
    batch = tapped_batch(8, torch.float32)
    batch["x"][0] = math.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipe.step(batch)
    assert (pipe.metrics.skipped, scaler.get_scale()) == (True, 2.0**8)
    assert all(p.isfinite().all() for p in pipe._session.model.parameters())


def test_values_of_on_nonfinite_that_are_unknown_are_refused():
    with pytest.raises(
        panpipe.RequestError, match=r"on_nonfinite is 'ignore': .* give 'raise', 'skip', 'warn', or None"
    ):
        poisoned_pipe("ignore")


# Gradients that are not finite where the loss is: what clipping measures is followed by what follows such a loss.


def pipe_of(mode, **options):
    return pipeline_of(ROOT, 8, 4, 3, optimizer=SGD, on_nonfinite=mode, **options)[0]


@pytest.mark.parametrize("clip_norm", [1.0, math.inf])
@pytest.mark.parametrize("mode", ["skip", "raise"])
def test_update_with_a_norm_that_is_not_finite_is_not_made(mode, clip_norm, caplog):
    pipe, undisturbed = pipe_of(mode, clip_norm=clip_norm), pipe_of(mode, clip_norm=clip_norm)
    stage = next(s.index for s in pipe.plan.stages if "root.shift" in s.parameters)
    said = (
        r"^the loss of step 2 is finite and the global norm of its gradients is (inf|nan): the gradient of "
        rf"'root.shift' in stage {stage} is not finite; no parameter was updated$"
    )
    for number, zero in enumerate((False, True, False), 1):
        before = parameters(pipe._session.model)
        given = root_batch(8, torch.float32, zero)
        if zero and mode == "raise":
            with pytest.raises(panpipe.NonFiniteError, match=said) as found:
                pipe.step(given)
            assert (found.value.step, found.value.stage) == (2, stage)
        else:
            assert pipe.step(given).isfinite()
        assert pipe.metrics.skipped is zero
        assert (unequal(parameters(pipe._session.model), before) == []) is zero
        if not zero:
            undisturbed.step(given)
        assert pipe.metrics.steps == number
    assert pipe.metrics.updates == 2
    assert unequal(parameters(pipe._session.model), parameters(undisturbed._session.model)) == []
    reported = [r.getMessage() for r in caplog.records if r.name == "panpipe" and r.levelno == logging.WARNING]
    assert len(reported) == (mode == "skip")


def test_without_clipping_or_without_a_check_the_update_is_made():
    zero = root_batch(8, torch.float32, zero=True)
    for pipe in (pipe_of("skip"), pipe_of(None, clip_norm=1.0)):
        assert pipe.step(zero).isfinite()
        assert not pipe.metrics.skipped
        assert not all(p.isfinite().all() for p in pipe._session.model.parameters())
