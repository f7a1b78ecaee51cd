"""``PanpipeTrainer``: the Trainer of transformers, whose model trains as a pipeline.

Trainer's own loop runs: data, logging, evaluation, checkpoints and callbacks are its own. Each forward, backward and
update is a step of a pipeline, which is built for the first batch.

train() ──▶ training_step(batch) ──▶ pipe.step(batch) ──▶ loss, grad_norm
        ──▶ prediction_step(batch) ──▶ pipe.evaluate, pipe.forward
        ──▶ checkpoint-N/ ──▶ pipe.save (as from_pretrained reads it), pipe.checkpoint (pipeline/)
"""

import math
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..api import pipeline
from ..core.capture.python.changes import random_states_kept
from ..core.errors import RequestError
from ..runtimes.pipeline import Pipeline
from .pipelines import ModelOptimizer, ReplicaRows, needs, refuse_twice, with_own
from .trainer_steps import SHARE, BatchCount, Outputs, step_of_trainer

with needs("transformers"):
    from transformers import Trainer

    from .accelerate import as_one_process

STATE = "pipeline"
"""The folder within a checkpoint of Trainer that has the state of the pipeline."""

_TRIED_ROWS = 16
"""Rows of the data set whose lengths are compared, at most."""

_OWN = {
    "optimizer": "optim, optim_args or optimizers=",
    "scheduler": "lr_scheduler_type",
    "clip_norm": "max_grad_norm",
    "seed": "seed",
    "scaler": "bf16",
    "weights": "from_pretrained",
}
"""Options of a pipeline that follow from Trainer's own arguments."""


class PipelinedModel(nn.Module):
    """The wrapped model of a Trainer (``model_wrapped``), which is otherwise a DistributedDataParallel."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *_: Any, **__: Any) -> Any:
        """Refuse: no process has the whole model.

        Raises:
            RequestError: always.
        """
        raise RequestError(
            "the model trains as a pipeline and is called as a function: use trainer.predict, or "
            "trainer.pipe.forward(batch, function)"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear nothing: the pipeline clears gradients after its update."""


class PanpipeTrainer(Trainer):
    """A ``transformers.Trainer`` that trains its model as a pipeline.

    ``per_device_train_batch_size`` is the whole batch of a pipeline, which is cut into microbatches. Under ``torchrun``
    the ranks are the devices of one pipeline: they read the same batches, and rank 0 logs and writes. Losses, weights,
    logs and checkpoints are those of Trainer in one process. With ``{"mesh": "pp=2,dp=2"}`` each replica trains on its
    rows of the batch.

    Args:
        pipeline: arguments of ``panpipe.pipeline``, such as ``{"microbatches": 8, "plan": "1f1b"}``; without those
            that Trainer has itself: optimizer, scheduler, clip_norm, scaler, weights and seed.
        args, kwargs: of ``Trainer``.

    Attributes:
        pipe: the pipeline; None before the first batch.

    Raises:
        RequestError: an argument has no meaning for a pipeline.
    """

    def __init__(self, *args: Any, pipeline: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self.pipe: Pipeline | None = None
        self._rows: ReplicaRows | None = None
        self._given = dict(pipeline or {})
        refuse_twice("pipeline=", "Trainer", self._given, _OWN)
        self._wrapped: PipelinedModel | None = None
        self._resumes: Path | None = None
        self._predictions: dict[tuple[str, ...], Outputs] = {}
        super().__init__(*args, **kwargs)

    # Devices and processes, as Trainer sees them

    def create_accelerator_and_postprocess(self) -> None:
        """Create accelerate's state of one process: the ranks of a pipeline read the same batches."""
        _refuse_arguments(self.args)
        _ = self.args.device  # creates the process group under torchrun
        if self.args.distributed_state is not None:
            as_one_process(self.args.distributed_state)
        self.args._n_gpu = min(self.args.n_gpu, 1)
        self.args.accelerator_config.dispatch_batches = False  # a dispatcher would broadcast over the ranks
        super().create_accelerator_and_postprocess()

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where it is: each device gets its own stages."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        if isinstance(model, PipelinedModel):
            model = model.module
        if self._wrapped is None or self._wrapped.module is not model:
            self._close()
            self._wrapped = PipelinedModel(model)
        return self._wrapped

    # Optimizer

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Create Trainer's optimizer, whose groups and options the stages' optimizers follow."""
        made = super().create_optimizer(model)
        if not isinstance(made, ModelOptimizer):
            made = self.optimizer = ModelOptimizer(made, self.model)
        return made

    @property
    def _model_optimizer(self) -> ModelOptimizer:
        """The optimizer without accelerate's wrapper."""
        made = getattr(self.optimizer, "optimizer", self.optimizer)
        assert isinstance(made, ModelOptimizer)
        return made

    def _clip_grad_norm(self, model: nn.Module) -> float | None:
        """The norm that the pipeline measured and clipped to."""
        return None if self.pipe is None else self.pipe.metrics.grad_norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> float | None:
        return self._clip_grad_norm(model)

    # Steps

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Train on a batch; the last one of an accumulation updates.

        Returns:
            The batch's part of the loss of the update.
        """
        self.model.train()
        inputs = self._batch(self._prepare_inputs(inputs))
        pipe, rows = self._pipeline(inputs)
        loss = pipe.step(rows.trained(inputs), update=self.accelerator.sync_gradients).detach()
        whole = self.current_gradient_accumulation_steps
        share = 1 / whole if num_items_in_batch is None else self._count(inputs) / num_items_in_batch
        part: Tensor = loss * share
        return part

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """Loss, logits and labels of a batch, as Trainer's."""
        self.model.eval()
        inputs = self._prepare_inputs(inputs)
        found = [inputs.get(name) for name in self.label_names]
        labelled = bool(found) and all(value is not None for value in found)
        returns_loss = inputs.get("return_loss", self.can_return_loss)
        pipe, rows = self._pipeline(self._batch(inputs))
        has_loss = labelled or (not found and returns_loss)
        loss = pipe.evaluate(rows.evaluated(self._batch(inputs))) if has_loss else None
        if prediction_loss_only:
            return loss, None, None
        if ignore_keys is None:
            ignore_keys = getattr(
                getattr(self.model, "config", None), "keys_to_ignore_at_inference", ["past_key_values"]
            )
        key = tuple(sorted({*ignore_keys, "loss"}))
        if key not in self._predictions:  # each function is captured once
            self._predictions[key] = Outputs(key, self._dtype)
        outputs = pipe.forward(inputs, self._predictions[key].of_microbatch)  # of all rows, in every replica
        logits = outputs[0] if len(outputs) == 1 else outputs
        labels = None if loss is None else (found[0] if len(found) == 1 else tuple(found))
        return loss, logits, labels

    def _batch(self, inputs: Any) -> Any:
        """The batch for the loss, with the share of each row if batches of other sizes belong to the same update."""
        if self.args.gradient_accumulation_steps == 1 or self._count.counts(inputs):
            return inputs
        rows = next((len(value) for value in inputs.values() if isinstance(value, Tensor) and value.ndim), 1)
        return {**inputs, SHARE: torch.full((rows,), 1 / rows, device=self.args.device)}

    @property
    def _count(self) -> BatchCount:
        """How Trainer counts the items of a batch."""
        return BatchCount(
            self.model_accepts_loss_kwargs or self.compute_loss_func is not None, self._loss_shifts_labels
        )

    @property
    def _dtype(self) -> torch.dtype | None:
        """The dtype of autocast; None without."""
        return torch.bfloat16 if self.args.bf16 else None

    # The pipeline

    def _pipeline(self, inputs: Any) -> tuple[Pipeline, ReplicaRows]:
        """The pipeline of the model, built for the first batch, and the rows of its replicas."""
        if self.pipe is not None:
            assert self._rows is not None
            return self.pipe, self._rows
        if self.optimizer is None:
            self.create_optimizer()
        given = dict(self._given)
        if self.args.device.type == "cuda":
            given.setdefault("devices", "cuda")
        given.setdefault("dynamic", self._padded(inputs))
        training, norm = self.model.training, self.args.max_grad_norm
        self.model.train()
        step = step_of_trainer(self, self._count, self._dtype, inputs)
        self._rows = ReplicaRows(self.model, step, inputs, given)
        self.pipe = pipeline(
            self.model,
            step,
            self._rows.trained(inputs),
            optimizer=self._model_optimizer.stages,
            **with_own(given, {"clip_norm": norm if norm > 0 else math.inf}, {"seed": self.args.seed}),
        )
        self.model.train(training)
        if self._resumes is not None:
            self.pipe.resume(self._resumes)
            self._resumes = None
        return self.pipe, self._rows

    def _padded(self, inputs: Mapping[str, Any]) -> dict[str, int] | None:
        """The dimension of the matrices that the collator pads to the longest row of a batch, by their names."""
        data, lengths = self.train_dataset, dict[str, set[int]]()
        collate = self._get_collator_with_removed_columns(self.data_collator)
        if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
            return None
        # A collator may need several rows: the step is then captured at the second length.
        with random_states_kept(), suppress(Exception):
            for index in range(0, len(data), -(-len(data) // _TRIED_ROWS)):
                for name, value in collate([data[index]]).items():
                    if isinstance(value, Tensor) and value.ndim == 2:
                        lengths.setdefault(name, set()).add(value.shape[1])
        return {name: 1 for name in inputs if len(lengths.get(name, ())) > 1} or None

    def _close(self) -> None:
        if self.pipe is not None:
            self.pipe.close()
        self.pipe, self._predictions = None, {}

    def end(self) -> None:
        """Close the pipeline and the process group."""
        self._close()
        super().end()

    # Files

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Write the model as ``save_pretrained`` does, so that ``from_pretrained`` reads it; every rank its stages."""
        if self.pipe is None:
            super()._save(output_dir, state_dict)
            return
        model, folder = self.model, Path(output_dir or self.args.output_dir)
        adapted = hasattr(model, "peft_config") and hasattr(model, "base_model")
        if adapted:
            from .peft import save_adapter

            save_adapter(self.pipe, folder)
        else:
            self.pipe.save(folder)
        if not self.args.should_save:
            return
        configurations = () if adapted else (getattr(model, "config", None), getattr(model, "generation_config", None))
        for part in (*configurations, self.processing_class or getattr(self.data_collator, "tokenizer", None)):
            if part is not None:
                part.save_pretrained(folder)
        torch.save(self.args, folder / "training_args.bin")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)  # the options of groups, and the scheduler
        if self.pipe is not None:
            state = Path(output_dir) / STATE
            if self.args.should_save and state.exists():
                # From an earlier run that was stopped or resumed; Trainer also replaces its files.
                shutil.rmtree(state)
            self.pipe.checkpoint(state)

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:  # all ranks draw the same numbers for their batches
            super()._save_rng_state(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not self._resume(Path(resume_from_checkpoint)):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if best is None or not self._resume(Path(best)):
            super()._load_best_model()

    def _resume(self, checkpoint: Path) -> bool:
        """Restore a pipeline's state, now or when it is built; False if the checkpoint has none.

        Raises:
            RequestError: the model is distributed over ranks already and the checkpoint is none of a pipeline.
        """
        state = checkpoint / STATE
        if not state.is_dir():
            if self.pipe is not None:
                raise RequestError(
                    f"'{checkpoint}' has no folder '{STATE}' and the pipeline is built: resume before the first batch, "
                    "or from a checkpoint of PanpipeTrainer without save_only_model"
                )
            return False
        if self.pipe is None:
            self._resumes = state
        else:
            self.pipe.resume(state)
        return True


def _refuse_arguments(args: Any) -> None:
    """Refuse arguments of Trainer that have no meaning for a pipeline."""
    reasons = {
        "fp16": "a pipeline computes in bf16 or float32 here: use bf16=True",
        "deepspeed": "a pipeline holds the model's parts itself: leave it out",
        "fsdp": "a pipeline holds the model's parts itself: leave it out",
        "torch_compile": "the pipeline compiles its stages: pipeline={'run': panpipe.Run(compile='inductor')}",
        "gradient_checkpointing": "a plan has recomputation: pipeline={'memory': panpipe.Memory(recompute='all')}",
        "activation_checkpointing": "a plan has recomputation: pipeline={'memory': panpipe.Memory(recompute='all')}",
        "auto_find_batch_size": "the plan keeps within the memory: pipeline={'memory': panpipe.Memory(offload='auto')}",
    }
    for name, fix in reasons.items():
        if getattr(args, name, None):
            raise RequestError(f"TrainingArguments has {name}={getattr(args, name)!r}: {fix}")
    if args.load_best_model_at_end and args.save_only_model:
        raise RequestError("load_best_model_at_end reads the state of a pipeline: leave save_only_model out")
