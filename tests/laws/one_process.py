"""Plain PyTorch with the interface of a pipeline: the same program, one microbatch after another, in one process."""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import panpipe
import torch
from torch import Tensor, nn

Step = Callable[[nn.Module, Any], Any]


def cut(batch: Any, count: int) -> list[Any]:
    """The microbatches of a batch: its tensors divided along dimension 0, what is no tensor in each of them."""
    if isinstance(batch, Tensor):
        return list(batch.tensor_split(count))
    if dataclasses.is_dataclass(batch):
        parts = {f.name: cut(getattr(batch, f.name), count) for f in dataclasses.fields(batch)}
        return [dataclasses.replace(batch, **{name: part[m] for name, part in parts.items()}) for m in range(count)]
    if isinstance(batch, Mapping):
        parts = {name: cut(value, count) for name, value in batch.items()}
        return [type(batch)({name: part[m] for name, part in parts.items()}) for m in range(count)]
    if isinstance(batch, tuple | list):
        columns = [cut(value, count) for value in batch]
        pieces = [[column[m] for column in columns] for m in range(count)]
        return [type(batch)(*piece) if hasattr(batch, "_fields") else type(batch)(piece) for piece in pieces]
    return [batch] * count


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a batch or of a result, in order."""
    if isinstance(value, Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        value = [getattr(value, f.name) for f in dataclasses.fields(value)]
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return [tensor for part in parts for tensor in tensors_in(part)]


def assigned_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors that are attributes of modules and neither parameters nor buffers."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                yield f"{path}.{name}".lstrip("."), value


def _parts(result: Any) -> tuple[Tensor, Any, dict[str, Any]]:
    """The loss, the step's own weight or None, and the metrics of what a step returned."""
    if isinstance(result, Tensor):
        return result, None, {}
    if isinstance(result, Mapping) or hasattr(result, "loss"):
        named = dict(result)
        scalars = {k: v for k, v in named.items() if isinstance(v, Tensor) and v.ndim == 0 and k != "loss"}
        return named["loss"], None, scalars
    loss, *more = result
    metrics = more.pop() if more and isinstance(more[-1], dict) else {}
    return loss, more[0] if more else None, metrics


_CHECKPOINTS: dict[str, dict[str, Any]] = {}
"""State by folder."""


class OneMetrics(dict[str, float]):
    """What ``pipe.metrics`` is, without a pipeline."""

    steps = 0
    grad_norm: float | None = None
    learning_rates: list[float] = []  # noqa: RUF012


class OneProcess:
    """What ``panpipe.pipeline`` returns, without a pipeline.

    Args:
        model, step, example_batch, optimizer, microbatches, seed, clip_norm, scheduler, batch_dims: as there.
        keyed: random numbers are those of the pipeline, by ``panpipe.reference_step``; otherwise nothing of panpipe
            runs.
        other: what has no effect on results.
    """

    def __init__(
        self, model: nn.Module, step: Step, example_batch: Any, *, optimizer: Any = None, microbatches: int = 8,
        update: panpipe.Update | None = None, run: panpipe.Run | None = None, batch_dims: Any = 0, keyed: bool = False,
        **other: object,
    ) -> None:  # fmt: skip
        update, run = update or panpipe.Update(), run or panpipe.Run()
        scheduler = update.scheduler
        self.model, self._step, self._microbatches, self._seed = model, step, microbatches, run.seed
        self._clip_norm, self._dims, self._keyed = update.clip_norm, batch_dims, keyed
        self._optimizer = optimizer(list(model.named_parameters())) if optimizer else None
        self._scheduler = scheduler(self._optimizer) if scheduler else None
        self.metrics = OneMetrics()
        self._kept_weight, self._averages = 0.0, list[Average]()

    @property
    def optimizers(self) -> dict[int, Any]:
        return {0: self._optimizer}

    def step(self, batch: Any, *, update: bool = True) -> Tensor:
        kept = {p: p.grad for p in self.model.parameters() if p.grad is not None and self._kept_weight}
        if self._keyed:
            loss = panpipe.reference_step(
                self.model, self._step, batch, microbatches=self._microbatches, seed=self._seed,
                index=self.metrics.steps, batch_dims=self._dims or "auto",
            )  # fmt: skip
            total = float(len(tensors_in(batch)[0]))
        else:
            self.model.zero_grad()
            loss, total = self._run(batch, self._step, backward=True)
        self.metrics.steps += 1
        self._add(kept, total)
        if not update:
            self._kept_weight += total
            return loss
        self._kept_weight = 0.0
        if self._clip_norm is not None:
            self.metrics.grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), self._clip_norm).item()
        if self._optimizer:
            self._optimizer.step()
        if self._scheduler:
            self._scheduler.step()
        if self._optimizer:
            self.metrics.learning_rates = [group["lr"] for group in self._optimizer.param_groups]
        for average in self._averages:
            average.update()
        return loss

    def _add(self, kept: dict[nn.Parameter, Tensor], weight: float) -> None:
        """Gradients are the mean over all samples since the last update."""
        before = self._kept_weight
        for parameter, earlier in kept.items():
            now = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = (earlier * before + now * weight) / (before + weight)

    def _run(self, batch: Any, step: Step, backward: bool) -> tuple[Tensor, float]:
        """The mean loss, and the sum of the weights that it was taken with."""
        pieces = self._cut(batch)
        losses, weights, metrics = list[Tensor](), list[float](), list[dict[str, Any]]()
        for piece in pieces:
            loss, weight, more = _parts(step(self.model, piece))
            weights.append(float(len(tensors_in(piece)[0]) if weight is None else weight))
            if backward and loss.requires_grad:
                (loss * weights[-1]).backward()
            losses.append(loss.detach())
            metrics.append({name: float(value) for name, value in more.items()})
        total = sum(weights)
        if backward:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad /= total
        self.metrics.clear()
        self.metrics.update(
            {name: sum(w * m[name] for w, m in zip(weights, metrics, strict=True)) / total for name in more}
        )
        return sum(loss * w for loss, w in zip(losses, weights, strict=True)) / total, total

    def _cut(self, batch: Any) -> list[Any]:
        return cut(batch, min(self._microbatches, len(tensors_in(batch)[0])))

    @torch.no_grad()
    def evaluate(self, batch: Any, *, step: Step | None = None) -> Tensor:
        """No microbatch changes anything for the next one."""
        function = step or self._step
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        assigned = {path: value.clone() for path, value in assigned_tensors(self.model)}

        def run(model: nn.Module, piece: Any) -> Any:
            result = function(model, piece)
            for buffer, value in buffers:
                buffer.copy_(value)
            for path, value in assigned.items():
                module, _, name = path.rpartition(".")
                setattr(model.get_submodule(module), name, value.clone())
            return result

        return self._run(batch, run, backward=False)[0]

    @torch.no_grad()
    def forward(self, batch: Any, function: Step) -> Any:
        return _joined([function(self.model, piece) for piece in self._cut(batch)])

    def on_parameters(self, function: Callable[[str, nn.Parameter], Any]) -> dict[str, Any]:
        with torch.no_grad():
            return {name: function(name, parameter) for name, parameter in self.model.named_parameters()}

    def ema(self, decay: float, *_: object) -> "Average":
        self._averages.append(Average(self.model, decay))
        return self._averages[-1]

    def state_dict(self) -> dict[str, Any]:
        held = self._optimizer.state_dict() if self._optimizer else {}
        return copy.deepcopy({"model": self.model.state_dict(), "optimizer": held, "steps": self.metrics.steps})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        if self._optimizer:
            self._optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self.metrics.steps = state["steps"]

    def checkpoint(self, folder: str | Path, **options: object) -> None:
        _CHECKPOINTS[str(folder)] = self.state_dict()  # no files: each rank runs this, and removes them

    def resume(self, folder: str | Path) -> None:
        self.load_state_dict(_CHECKPOINTS[str(folder)])

    def close(self) -> None: ...

    def __enter__(self) -> "OneProcess":
        return self

    def __exit__(self, *error: object) -> None: ...


class Average:
    """An average of a model's parameters."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._decay = decay
        self._held = [(p, p.detach().clone()) for p in model.parameters()]

    def update(self) -> None:
        for parameter, average in self._held:
            average.lerp_(parameter.detach(), 1 - self._decay)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        self._exchange()
        yield
        self._exchange()

    def _exchange(self) -> None:
        for parameter, average in self._held:
            value = average.clone()
            average.copy_(parameter.detach())
            parameter.data.copy_(value)


def _joined(results: Sequence[Any]) -> Any:
    first = results[0]
    if isinstance(first, Tensor):
        return torch.cat(list(results))
    if isinstance(first, dict):
        return {name: _joined([result[name] for result in results]) for name in first}
    return type(first)(_joined(column) for column in zip(*results, strict=True))
