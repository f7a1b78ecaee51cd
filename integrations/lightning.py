"""``PanpipeStrategy``: a strategy of lightning whose module trains as a pipeline.

Trainer.fit ──▶ training_step(batch) ──▶ pipe.step(batch): forward, backward, update; what it logs
            ──▶ validation_step(batch) ──▶ pipe.evaluate
            ──▶ save_checkpoint ──▶ FILE.ckpt, as lightning reads it, and FILE.ckpt.pipeline/ (optimizer, counts)

A LightningModule's steps as functions of a module and a microbatch, with what they log as metrics.

A step of a pipeline is captured once, so ``self.log`` within it must not call lightning: the logged tensors are
metrics of the step, and the strategy logs their means over the batch. Values that change between steps, such as
``self.global_step``, are refused: a captured step would keep the first value.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import RandomSampler

from ..api import pipeline
from ..backends.data_collectives import broadcast_data
from ..core.errors import RequestError
from ..runtimes.pipeline import Pipeline
from .pipelines import ModelOptimizer, ReplicaRows, needs, refuse_twice, with_own

with needs("lightning"):
    from lightning.pytorch.strategies import SingleDeviceStrategy
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities.data import extract_batch_size

Logged = dict[str, dict[str, Any]]
"""Name → the options of ``self.log``."""

_options: ContextVar[Logged | None] = ContextVar("options of what a step logs", default=None)
_values: ContextVar[dict[str, Tensor] | None] = ContextVar("what a step logs", default=None)


class Unavailable:
    """A value that a captured step cannot read; any use of it raises."""

    _name: str
    _fix: str

    def __init__(self, name: str, fix: str) -> None:
        self.__dict__.update(_name=name, _fix=fix)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise RequestError(
            f"{self._name} is read within a step, which is captured once and keeps its value: {self._fix}"
        )

    __getattr__ = __bool__ = __index__ = __int__ = __float__ = __eq__ = __lt__ = __gt__ = __le__ = __ge__ = _refuse
    __mod__ = __add__ = __radd__ = __sub__ = __mul__ = __rmul__ = __truediv__ = __floordiv__ = __hash__ = _refuse


TRAINER = Unavailable("self.trainer", "pass what changes between steps in the batch, and log after the step")
INDEX = Unavailable("batch_idx", "put the number into the batch")


def _log(name: str, value: Any, **options: Any) -> None:
    """Replaces ``LightningModule.log`` within a step.

    Options are known from the capture; what remains Python runs in a thread of its device, without them.
    """
    values, known = _values.get(), _options.get()
    if values is None:
        raise RequestError(
            f"self.log('{name}') is called in Python that the pipeline runs in each step: log after the step"
        )
    if not isinstance(value, Tensor | int | float):
        raise RequestError(f"self.log('{name}') has a {type(value).__name__}: log a tensor or a number")
    values[name] = torch.as_tensor(value).detach().float().mean()
    if known is not None:
        known[name] = options


def _log_dict(dictionary: Mapping[str, Any], **options: Any) -> None:
    for name, value in dictionary.items():
        _log(name, value, **options)


@contextmanager
def detached(module: nn.Module, logged: Logged) -> Iterator[None]:
    """Detach a module from its trainer within a context, so that its steps can be captured.

    Args:
        logged: filled with the options of every logged value.
    """
    own = module.__dict__
    trainer = own["_trainer"]
    own.update(_trainer=TRAINER, log=_log, log_dict=_log_dict)
    token = _options.set(logged)
    try:
        yield
    finally:
        _options.reset(token)
        del own["log"], own["log_dict"]
        own["_trainer"] = trainer


def loss_of(name: str, shared: bool) -> Callable[[Any, Any], Any]:
    """A step for ``panpipe.pipeline``, or for ``evaluate``.

    Args:
        shared: whether batches are pairs of a batch and the shares of its rows in it.
    """

    def step(module: Any, batch: Any) -> Any:
        batch, shares = batch if shared else (batch, None)
        token = _values.set({})
        try:
            result = getattr(module, name)(batch, INDEX)
            logged = _values.get() or {}
        finally:
            _values.reset(token)
        loss = result.get("loss") if isinstance(result, Mapping) else result
        if loss is None:
            loss = next(iter(logged.values()), None)
        if loss is None:
            raise RequestError(f"{name} returns no loss and logs nothing: return a loss, or log one")
        return (loss, logged) if shares is None else (loss, shares.sum(), logged)

    return step


def prediction(module: Any, batch: Any) -> Any:
    """``predict_step`` as a function for ``forward``."""
    return module.predict_step(batch, INDEX)


_OWN = {
    "optimizer": "configure_optimizers",
    "scheduler": "configure_optimizers",
    "clip_norm": "Trainer(gradient_clip_val=…)",
    "scaler": "torch.autocast with bfloat16 in the step",
}
"""Options of a pipeline that follow from lightning's own arguments."""


class PanpipeStrategy(SingleDeviceStrategy):
    """Train a LightningModule as a pipeline: ``Trainer(strategy=PanpipeStrategy(microbatches=8))``.

    A batch of the loader is the whole batch of the pipeline. Under ``torchrun`` the ranks are the devices of one
    pipeline: they read the same batches, and rank 0 logs and writes. With ``mesh="pp=2,dp=2"`` each replica trains on
    its rows of the batch.

    Args:
        options: of ``panpipe.pipeline``, without those that lightning has itself: optimizer, and clip_norm,
            scaler and scheduler of ``update``.

    Attributes:
        pipe: the pipeline; None before the first training batch. Until then validation runs on the whole module.

    Raises:
        RequestError: an option or a setting of lightning has no meaning for a pipeline.
    """

    strategy_name = "panpipe"

    def __init__(self, **options: Any) -> None:
        refuse_twice("PanpipeStrategy", "lightning", options, _OWN)
        super().__init__(torch.device("cpu"))
        self.global_rank = int(os.environ.get("RANK", "0"))
        self.pipe: Pipeline | None = None
        self._rows: ReplicaRows | None = None
        self._given = options
        self._logged: dict[str, Logged] = {}
        self._steps: dict[str, Any] = {}
        self._loaded = Path()  # the pipeline's state next to the checkpoint that was read last
        self._resumes: Path | None = None  # the state to resume from when the pipeline is built

    # Ranks

    @property
    def is_global_zero(self) -> bool:
        """Whether this process logs and writes."""
        return self.global_rank == 0

    def barrier(self, *_: Any, **__: Any) -> None:
        """Wait for all ranks."""
        if dist.is_initialized():
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """A value of one rank on all of them, such as the name of a checkpoint."""
        if not dist.is_initialized():
            return obj
        return broadcast_data(obj, src)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Let all ranks draw the same order of samples, whatever else they draw."""
        sampler = getattr(dataloader, "sampler", None)
        if "RANK" in os.environ and isinstance(sampler, RandomSampler) and sampler.generator is None:
            sampler.generator = torch.Generator().manual_seed(torch.initial_seed())
        return dataloader

    # Steps

    def setup_optimizers(self, trainer: Any) -> None:
        """Create the module's optimizer, whose groups and options the stages' optimizers follow."""
        self._close()
        super().setup_optimizers(trainer)
        created: list[Any] = super().optimizers
        _refuse_settings(trainer, self.lightning_module, created)
        self.optimizers = [ModelOptimizer(created[0], self.lightning_module)]

    def training_step(self, batch: Any, *_: Any) -> Tensor:
        """Train on a batch; the last one of an accumulation updates.

        Returns:
            The loss of the batch.
        """
        trainer = self.lightning_module.trainer
        batch = self._shared(batch)
        with detached(self.lightning_module, self._logged_by("training_step")):
            pipe = self.pipe or self._build(batch, trainer)
            assert self._rows is not None
            loss = pipe.step(self._rows.trained(batch), update=not trainer.fit_loop._should_accumulate())
        self._log("training_step", pipe)
        return loss

    def validation_step(self, *arguments: Any) -> Any:
        """The loss of a batch, forward only."""
        return self._evaluate("validation_step", *arguments)

    def test_step(self, *arguments: Any) -> Any:
        """The loss of a batch, forward only."""
        return self._evaluate("test_step", *arguments)

    def predict_step(self, batch: Any, *arguments: Any) -> Any:
        """What the module predicts for a batch, on every rank."""
        if self.pipe is None:
            return super().predict_step(batch, *arguments)
        with detached(self.lightning_module, {}):
            return self.pipe.forward(batch, prediction)

    def _evaluate(self, name: str, batch: Any, *arguments: Any) -> Any:
        if self.pipe is None:  # the module still has all its parameters on every rank
            return getattr(super(), name)(batch, *arguments)
        assert self._rows is not None
        step = self._steps.setdefault(name, loss_of(name, shared=False))  # each function is captured once
        with detached(self.lightning_module, self._logged_by(name)):
            loss = self.pipe.evaluate(self._rows.evaluated(batch, step), step=step)
        self._log(name, self.pipe)
        return loss

    def backward(self, closure_loss: Tensor, *_: Any, **__: Any) -> Tensor:
        """Do nothing: the pipeline's step has already run the backward."""
        return closure_loss

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **_: Any) -> Any:
        """Run the step; the pipeline updates within it."""
        return optimizer.step(closure)

    def _shared(self, batch: Any) -> Any:
        """The batch, with the share of each row if several batches belong to one update; each counts the same."""
        if self.lightning_module.trainer.accumulate_grad_batches == 1:
            return batch
        rows = extract_batch_size(batch)
        return batch, torch.full((rows,), 1 / rows)

    def _logged_by(self, name: str) -> Logged:
        return self._logged.setdefault(name, {})

    def _log(self, name: str, pipe: Pipeline) -> None:
        """Log the means over the batch of what a step logs."""
        for key, options in self._logged_by(name).items():
            self.lightning_module.log(key, pipe.metrics[key], **options)

    @property
    def _model_optimizer(self) -> ModelOptimizer:
        (optimizer,) = self.optimizers
        assert isinstance(optimizer, ModelOptimizer)
        return optimizer

    def _build(self, batch: Any, trainer: Any) -> Pipeline:
        """The pipeline of the module, built for the first batch."""
        step = loss_of("training_step", shared=trainer.accumulate_grad_batches > 1)
        self._rows = ReplicaRows(self.lightning_module, step, batch, self._given)
        self.pipe = pipeline(
            self.lightning_module,
            step,
            self._rows.trained(batch),
            optimizer=self._model_optimizer.stages,
            **with_own(self._given, {"clip_norm": trainer.gradient_clip_val or None}, {}),
        )
        if self._resumes is not None:
            self.pipe.resume(self._resumes)
            self._resumes = None
        # Lightning clears gradients that this rank may not hold; the pipeline clears them after its update.
        self.lightning_module.__dict__["zero_grad"] = _clear_nothing
        return self.pipe

    # Files

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint that lightning also reads without this strategy, and the pipeline's state next to it."""
        if self.pipe is not None:
            state, weights = Path(f"{filepath}.pipeline"), Path(f"{filepath}.weights")
            if self.is_global_zero:
                shutil.rmtree(state, ignore_errors=True)
            if "optimizer_states" in checkpoint:
                self.pipe.checkpoint(state)
            if dist.is_initialized():
                self.pipe.save(weights)
                self.barrier()
                if self.is_global_zero:
                    checkpoint["state_dict"] = _read(weights, self.lightning_module.state_dict(keep_vars=True))
                    shutil.rmtree(weights)
        super().save_checkpoint(checkpoint, filepath, storage_options)
        self.barrier()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights; empty where ranks hold a part each, whose weights `save_checkpoint` collects."""
        return {} if self.pipe is not None and dist.is_initialized() else super().lightning_module_state_dict()

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint and the pipeline's state."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(f"{filepath}.pipeline", ignore_errors=True)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint, without the pipeline's state."""
        self._loaded = Path(f"{checkpoint_path}.pipeline")
        found: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        return found

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights into the module, or into the pipeline if it is built.

        Raises:
            RequestError: the pipeline is built, and its state is not next to the checkpoint.
        """
        state = self._loaded if self._loaded.is_dir() else None
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            self._resumes = state  # fit builds the pipeline, also if an earlier fit did
        if self.pipe is None:
            super().load_model_state_dict(checkpoint, strict)
        elif state is None:
            raise RequestError(
                f"the pipeline is built and there is no folder '{self._loaded}' with its state: use a checkpoint of "
                "PanpipeStrategy without save_weights_only, or a new Trainer"
            )
        else:
            self.pipe.resume(state)

    def teardown(self) -> None:
        """Keep the pipeline, which has the weights: ``save_checkpoint`` and ``test`` may follow ``fit``."""
        self.lightning_module.__dict__.pop("zero_grad", None)

    def _close(self) -> None:
        """Close the pipeline of an earlier ``fit``; a script that ends closes its last one."""
        if self.pipe is not None:
            self.pipe.close()
        self.pipe, self._rows = None, None


def _clear_nothing(set_to_none: bool = True) -> None:
    """Clear nothing; replaces ``Module.zero_grad``, because the pipeline clears gradients after its update."""


def _read(folder: Path, wanted: Mapping[str, Any]) -> dict[str, Tensor]:
    """The weights that all ranks wrote, under all their names.

    Args:
        wanted: the module's own state dict, in which tied weights have several names.
    """
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    identities: dict[int, str] = {}
    for name in found:
        identities.setdefault(id(wanted[name]), name)
    return {name: found[name] if name in found else found[identities[id(value)]] for name, value in wanted.items()}


def _refuse_settings(trainer: Any, module: Any, optimizers: list[Any]) -> None:
    """Refuse settings of lightning that have no meaning for a pipeline."""
    if not module.automatic_optimization:
        raise RequestError(
            "automatic_optimization is False: a pipeline runs forward, backward and update in one step; leave it True"
        )
    if len(optimizers) != 1:
        raise RequestError(
            f"configure_optimizers returns {len(optimizers)} optimizers: a pipeline has one; use parameter groups"
        )
    if trainer.gradient_clip_val and trainer.gradient_clip_algorithm not in (None, "norm"):
        raise RequestError(
            f"gradient_clip_algorithm is '{trainer.gradient_clip_algorithm}': a pipeline clips by the norm; use 'norm'"
        )
    if str(trainer.precision) not in ("32-true", "64-true"):
        raise RequestError(
            f"precision is '{trainer.precision}': lightning casts a module that a pipeline has split; use "
            "torch.autocast in the step"
        )
