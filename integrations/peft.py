"""PEFT: adapters such as LoRA, whose base weights are frozen.

A PeftModel trains with ``panpipe.pipeline`` and with ``PanpipeTrainer`` as any other model: frozen weights get no
gradient and no optimizer state. This module writes the adapter alone, as ``PeftModel.save_pretrained`` does.
"""

import shutil
from pathlib import Path

from safetensors.torch import load_file

from ..core.errors import RequestError
from ..runtimes.pipeline import Pipeline
from .pipelines import needs

with needs("peft"):
    from peft import PeftModel


def save_adapter(pipe: Pipeline, folder: str | Path) -> None:
    """Write the adapter of a pipeline's model, for ``PeftModel.from_pretrained``. Every rank calls this.

    It returns on all ranks when the adapter is written, or raises the same error on all.

    Args:
        pipe: a pipeline of a ``PeftModel``.
        folder: one that all ranks can access.

    Raises:
        RequestError: the model is no PeftModel, or the folder cannot be written.
    """
    model, folder = pipe._session.model, Path(folder)
    if not isinstance(model, PeftModel):
        raise RequestError(f"the model is a {type(model).__name__}, not a PeftModel: use pipe.save(folder)")
    parts = folder / "parts"
    pipe.save(parts, frozen=False)

    def write() -> None:
        """On one rank: the parts as PEFT writes them."""
        files = sorted(parts.glob("*.safetensors"))
        trained = {name: tensor for path in files for name, tensor in load_file(path).items()}
        try:
            model.save_pretrained(folder, state_dict=trained, save_embedding_layers=False)
            shutil.rmtree(parts)
        except OSError as error:
            raise RequestError(f"cannot write the adapter to '{folder}': {error.strerror}; give another") from None

    pipe._session.trainer.team.decide(write)
