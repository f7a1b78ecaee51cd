"""`PanpipeStrategy` against lightning in one process: losses, logs, weights, checkpoints and resuming."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from panpipe.core.errors import RequestError
from panpipe.integrations.lightning import PanpipeStrategy
from torch import nn

from ..laws.grouped import grouped

pytestmark = pytest.mark.filterwarnings("default")  # of lightning
OPTIONS = grouped(microbatches=4, schedule="1f1b", max_chunks=1, progress=False)


class Regression(LightningModule):
    """A module as lightning's documentation has them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layers = [layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.Tanh())]
        self.layers = nn.Sequential(*layers, nn.Linear(8, 1)).double()

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.layers(batch["x"]), batch["y"])
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        error = (self.layers(batch["x"]) - batch["y"]).abs().mean()
        self.log("val_error", error)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"}]


class Losses(Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.seen.append((outputs["loss"].item(), trainer.optimizers[0].param_groups[0]["lr"]))


def loader(rows):
    draw = torch.Generator().manual_seed(0)
    data = [{"x": torch.randn(8, generator=draw).double(), "y": torch.ones(1).double()} for _ in range(rows)]
    return torch.utils.data.DataLoader(data, batch_size=8)


def trained(folder, strategy, module=None, resume=None, **more):
    losses = Losses()
    trainer = Trainer(
        accelerator="cpu", devices=1, strategy=strategy, default_root_dir=folder, callbacks=[losses],
        enable_progress_bar=False, enable_model_summary=False, logger=False, gradient_clip_val=0.5,
        **{"max_epochs": 2, "enable_checkpointing": False, **more},
    )  # fmt: skip
    module = module or Regression()
    trainer.fit(module, loader(32), loader(16), ckpt_path=resume)
    return module, trainer, losses.seen


def assert_same(found, wanted, tolerance=1e-9):
    for (name, mine), other in zip(found.named_parameters(), wanted.parameters(), strict=True):
        assert (mine - other).norm() <= tolerance * other.norm(), name


def test_lightning_logs_and_weights_equal_those_of_one_process(tmp_path):
    alone, first, losses = trained(tmp_path, "auto")
    piped, second, found = trained(tmp_path, PanpipeStrategy(**OPTIONS))
    torch.testing.assert_close(found, losses, rtol=1e-7, atol=0)
    assert {*second.callback_metrics} == {*first.callback_metrics}
    for name, value in first.callback_metrics.items():
        assert second.callback_metrics[name].item() == pytest.approx(value.item(), rel=1e-6), name
    assert_same(piped, alone)


class Weighted(Regression):
    """The loss needs numbers, as the lengths of a CTC loss: this line and what follows it stay Python."""

    def training_step(self, batch, batch_idx):
        errors = (self.layers(batch["x"]) - batch["y"]).square()
        weights = batch["y"].new_tensor([[value] for value in batch["y"].flatten().tolist()])
        loss = (errors * weights).mean()
        self.log("train_loss", loss)
        return loss


def test_what_a_step_logs_after_a_line_that_stays_python_is_logged(tmp_path):
    alone, first, losses = trained(tmp_path, "auto", Weighted(), max_epochs=1)
    piped, second, found = trained(tmp_path, PanpipeStrategy(**OPTIONS), Weighted(), max_epochs=1)
    torch.testing.assert_close(found, losses, rtol=1e-7, atol=0)
    torch.testing.assert_close(second.callback_metrics, first.callback_metrics, check_dtype=False)
    assert_same(piped, alone)


class ResumedPipeline:
    """In place of a pipeline: records what it resumes from."""

    def __init__(self):
        self.resumed = []

    def resume(self, folder):
        self.resumed.append(folder.name)


def loads(strategy, function, path):
    """Load a checkpoint file as lightning does for one of its functions."""
    module = Regression()
    torch.save({"state_dict": module.state_dict()}, path)
    module._trainer = SimpleNamespace(state=SimpleNamespace(fn=function))
    strategy._lightning_module = module
    strategy.load_model_state_dict(strategy.load_checkpoint(path))


def test_pipeline_resumes_once_and_only_from_the_checkpoint_of_its_fit(tmp_path):
    for name in ("fit", "test"):
        (tmp_path / f"{name}.ckpt.pipeline").mkdir()
    strategy = PanpipeStrategy(**OPTIONS)
    loads(strategy, TrainerFn.FITTING, tmp_path / "fit.ckpt")
    loads(strategy, TrainerFn.TESTING, tmp_path / "test.ckpt")
    assert strategy._resumes == tmp_path / "fit.ckpt.pipeline"
    strategy._resumes, strategy.pipe = None, ResumedPipeline()
    loads(strategy, TrainerFn.TESTING, tmp_path / "test.ckpt")
    assert strategy.pipe.resumed == ["test.ckpt.pipeline"]
    assert strategy._resumes is None


def test_checkpoint_without_the_pipelines_state_is_refused_once_it_is_built(tmp_path):
    strategy = PanpipeStrategy(**OPTIONS)
    strategy.pipe = ResumedPipeline()
    with pytest.raises(RequestError, match=r"no folder '.*weights\.ckpt\.pipeline'.*without save_weights_only"):
        loads(strategy, TrainerFn.TESTING, tmp_path / "weights.ckpt")
