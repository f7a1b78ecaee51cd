"""Frameworks' training over replicas of a pipeline: ``torchrun … framework_runs.py FOLDER``.

Rank 0 writes FOLDER/found.json. Weights are in FOLDER/NAME, as each framework saves them.
"""

import json
import os
import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from accelerate import Accelerator
from lightning.pytorch import Trainer as Lightning
from panpipe.integrations.accelerate import pipeline_accelerator, prepare
from panpipe.integrations.lightning import PanpipeStrategy
from panpipe.integrations.peft import save_adapter
from panpipe.integrations.transformers import PanpipeTrainer
from peft import LoraConfig, get_peft_model
from transformers import Trainer

from tests.integrations import test_accelerate as accelerating
from tests.integrations import test_lightning as lightning
from tests.integrations import test_transformers as transforming
from tests.laws.grouped import grouped

OPTIONS = grouped(microbatches=2, schedule="1f1b", max_chunks=1, progress=False)
MESH = "pp=2,dp=2"
ROWS = 45
"""In batches of 8: the last one has 5 rows, three for one replica and two for the other."""
NAMES = "loss", "grad_norm", "learning_rate"


def on_mesh():
    """The options of the pipeline, over replicas where there are ranks."""
    return {**OPTIONS, "mesh": MESH} if "RANK" in os.environ else None


def trainer_of(folder, model, **more):
    """transformers' Trainer in one process, or on the mesh."""
    options = on_mesh()
    kind = Trainer if options is None else PanpipeTrainer
    given = {} if options is None else {"pipeline": options}
    data = {"train_dataset": transforming.samples(ROWS), "eval_dataset": transforming.samples(13, seed=1)}
    return kind(model, transforming.arguments(folder, max_steps=8, **more), **data, **given)


def transformers(folder):
    """Trainer with accumulation over batches of unequal numbers of tokens, evaluation, prediction and a checkpoint."""
    trainer = trainer_of(
        folder / "runs", transforming.model_of(), gradient_accumulation_steps=2, save_strategy="steps", save_steps=4
    )
    trainer.train()
    found = transforming.logged(trainer, *NAMES), trainer.evaluate()["eval_loss"]
    predicted = trainer.predict(transforming.samples(13, seed=1)).predictions
    trainer.save_model(str(folder / "transformers"))
    return [*found, [list(predicted.shape), float(abs(predicted).sum())]]


def resumed(folder):
    """The second half of the same training, from its checkpoint."""
    trainer = trainer_of(
        folder / "runs", transforming.model_of(), gradient_accumulation_steps=2, save_strategy="steps", save_steps=4
    )
    trainer.train(resume_from_checkpoint=str(folder / "runs" / "checkpoint-4"))
    return transforming.logged(trainer, *NAMES)


def peft(folder):
    """An adapter."""
    model = get_peft_model(
        transforming.model_of(), LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
    ).double()
    trainer = trainer_of(folder / "adapters", model)
    trainer.train()
    if isinstance(trainer, PanpipeTrainer):
        save_adapter(trainer.pipe, folder / "peft")
    else:
        model.save_pretrained(folder / "peft")
    return transforming.logged(trainer, *NAMES)


def loader():
    """Batches of accelerate's test, the last one smaller."""
    return torch.utils.data.DataLoader(accelerating.data()[:ROWS], batch_size=8)


def accelerate(folder):
    """A loop of accelerate."""
    model, options = accelerating.make_model(), on_mesh()
    optimizer, scheduler = accelerating.optimizer_of(model)
    if options is None:
        return _alone(folder, model, optimizer, scheduler)
    accelerator = pipeline_accelerator(cpu=True)
    batches = accelerator.prepare(loader())
    pipe, optimizer, scheduler = prepare(
        accelerator, model, accelerating.step, next(iter(batches)), optimizer, scheduler, **options
    )
    losses = []
    for batch in batches:
        with accelerator.accumulate():
            losses.append(pipe.step(batch).item())
            optimizer.step()
            scheduler.step()
    losses.append(pipe.evaluate(next(iter(batches))).item())
    losses.append(pipe.evaluate({name: rows[:1] for name, rows in next(iter(batches)).items()}).item())
    pipe.save(folder / "accelerate")
    pipe.close()
    return losses


def _alone(folder, model, optimizer, scheduler):
    accelerator = Accelerator(cpu=True)
    batches = accelerator.prepare(loader())
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    losses = []
    for batch in batches:
        with accelerator.accumulate(model):
            loss = accelerating.step(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    first = next(iter(batches))
    with torch.no_grad():
        losses.append(accelerating.step(model, first).item())
        losses.append(accelerating.step(model, {name: rows[:1] for name, rows in first.items()}).item())
    accelerator.save_model(model, folder / "accelerate")
    return losses


def lightnings(folder):
    """A module of lightning, with a checkpoint that lightning reads without a strategy."""
    options, losses = on_mesh(), lightning.Losses()
    trainer = Lightning(
        accelerator="cpu", devices=1, strategy="auto" if options is None else PanpipeStrategy(**options),
        default_root_dir=folder, callbacks=[losses], enable_progress_bar=False, enable_model_summary=False,
        logger=False, gradient_clip_val=0.5, max_epochs=2, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(lightning.Regression(), lightning.loader(37), lightning.loader(16))
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    trainer.save_checkpoint(folder / "lightning.ckpt")
    return [losses.seen, metrics]


FRAMEWORKS = {
    "transformers": transformers,
    "resumed": resumed,
    "peft": peft,
    "accelerate": accelerate,
    "lightning": lightnings,
}


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    folder, names = Path(sys.argv[1]), sys.argv[2].split(",")
    found = {name: FRAMEWORKS[name](folder) for name in names}
    if os.environ.get("RANK", "0") == "0":
        (folder / "found.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
