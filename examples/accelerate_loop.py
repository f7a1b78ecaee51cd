"""A training loop of accelerate around a pipeline: accumulation, a scheduler, ``save_state`` and ``load_state``.

python examples/accelerate_loop.py
torchrun --nproc-per-node 2 examples/accelerate_loop.py
"""

import argparse

import panpipe
import torch
from panpipe.integrations.accelerate import pipeline_accelerator, prepare
from torch import nn
from torch.utils.data import DataLoader


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """An ordinary training step."""
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="out/accelerate", help="folder of the state")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    hidden = [layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.Tanh())]
    model = nn.Sequential(*hidden, nn.Linear(32, 1))
    x = torch.randn(512, 32)
    samples = [{"x": row, "y": row[:1].abs()} for row in x]

    accelerator = pipeline_accelerator(cpu=True, gradient_accumulation_steps=2)
    loader = accelerator.prepare(DataLoader(samples, batch_size=32, shuffle=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    pipe, optimizer, scheduler = prepare(
        accelerator, model, step, next(iter(loader)), optimizer, scheduler,
        microbatches=4, plan="1f1b", update=panpipe.Update(clip_norm=1.0), run=panpipe.Run(progress=False),
    )  # fmt: skip
    for epoch in range(3):
        for batch in loader:
            with accelerator.accumulate():
                loss = pipe.step(batch)  # forward, backward, and in each second batch the update
                optimizer.step()
                scheduler.step()
        accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}, learning rate {scheduler.get_last_lr()[0]:.2e}")
    accelerator.save_state(arguments.out)
    accelerator.load_state(arguments.out)
    pipe.close()


if __name__ == "__main__":
    main()
