"""Train a LightningModule as a pipeline: the only change is ``strategy=PanpipeStrategy(…)``.

python examples/lightning_module.py
torchrun --nproc-per-node 2 examples/lightning_module.py
"""

import argparse

import panpipe
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from panpipe.integrations.lightning import PanpipeStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(LightningModule):
    """Eight layers that find which of four numbers is the largest."""

    def __init__(self) -> None:
        super().__init__()
        hidden = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.ReLU())]
        self.layers = nn.Sequential(nn.Linear(4, 64), *hidden, nn.Linear(64, 4))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        logits = self.layers(batch[0])
        self.log("val_accuracy", (logits.argmax(1) == batch[1]).float().mean())
        return nn.functional.cross_entropy(logits, batch[1])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)]


def loader(rows: int, seed: int) -> DataLoader:
    """Batches of 32 samples."""
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(x, x.argmax(1)), batch_size=32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="out/lightning", help="folder of checkpoints")
    parser.add_argument("--epochs", type=int, default=4, help="epochs")
    parser.add_argument("--resume", help="a checkpoint to continue from")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    trainer = Trainer(
        strategy=PanpipeStrategy(microbatches=4, plan="1f1b", run=panpipe.Run(progress=False)),
        accelerator="cpu", devices=1,
        max_epochs=arguments.epochs, gradient_clip_val=1.0, logger=False, enable_progress_bar=False,
        default_root_dir=arguments.out, callbacks=[ModelCheckpoint(arguments.out, save_top_k=-1)],
    )  # fmt: skip
    trainer.fit(Classifier(), loader(512, 0), loader(128, 1), ckpt_path=arguments.resume)
    if trainer.is_global_zero:
        print({name: round(value.item(), 4) for name, value in trainer.callback_metrics.items()})


if __name__ == "__main__":
    main()
