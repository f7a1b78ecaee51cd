"""Writing a pipeline's model as ``save_pretrained`` does, so that ``from_pretrained`` reads it."""

from pathlib import Path
from typing import Any

import torch

from ..runtimes.pipeline import Pipeline


def save_pretrained(trainer: Any, pipe: Pipeline, folder: Path) -> None:
    """Write weights, configuration and tokenizer. Every rank calls this.

    Args:
        trainer: a ``Trainer`` of transformers.
        pipe: its pipeline.
        folder: a folder that all ranks can access.
    """
    model = trainer.model
    adapted = hasattr(model, "peft_config") and hasattr(model, "base_model")
    if adapted:
        from .peft import save_adapter

        save_adapter(pipe, folder)
    else:
        pipe.save(folder)
    if not trainer.args.should_save:
        return
    configurations = () if adapted else (getattr(model, "config", None), getattr(model, "generation_config", None))
    for part in (*configurations, _processing(trainer)):
        if part is not None:
            part.save_pretrained(folder)
    torch.save(trainer.args, folder / "training_args.bin")


def _processing(trainer: Any) -> Any:
    """The tokenizer or processor that Trainer writes."""
    return trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
