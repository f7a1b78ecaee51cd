"""What a device keeps of a stage between steps: parameters, buffers, gradients and the optimizer."""

from collections.abc import Callable, Iterable
from functools import cached_property

import torch
from torch import Tensor, nn

from ..backends.contract import Backend
from .buckets import Bucket, Reduction, buckets_of
from .compute import compute_device

OptimizerFactory = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
"""Makes an optimizer of (name, parameter) pairs: ``torch.optim.AdamW``, or a function that forms groups by name."""


def state_share(optimizer: OptimizerFactory | None) -> float:
    """Bytes of optimizer state for each byte of a parameter, as a small parameter of its own tells.

    Args:
        optimizer: makes one; where it cannot make one for any parameter, Adam's share, 2.
    """
    if optimizer is None:
        return 0.0
    probe = nn.Parameter(torch.zeros(64, 64))
    try:
        made = optimizer([("probe", probe)])
        probe.grad = torch.zeros_like(probe)
        made.step()
        held = [value for per in made.state.values() for value in per.values() if isinstance(value, Tensor)]
    except Exception:
        return 2.0
    # Counters of steps are no share of anything.
    return sum(value.nbytes for value in held if value.numel() >= 64) / probe.nbytes


class StageState:
    """Parameters, buffers, gradients and optimizer of one stage.

    Args:
        parameters: by qualified name; the user's own tensors, or a replica of a tied weight.
        buffers: by qualified name.
        optimizer: makes the stage's optimizer; None for a stage that is only run.
        replicated: whether its gradients are summed over replicas of the pipeline.
        device: where the stage runs; by default where its tensors are.
    """

    def __init__(
        self, parameters: dict[str, nn.Parameter], buffers: dict[str, Tensor], optimizer: OptimizerFactory | None,
        replicated: bool = False,
        device: torch.device | None = None,
    ) -> None:  # fmt: skip
        self.parameters = parameters
        self.device = device or compute_device([*parameters.values(), *buffers.values()])
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._replicated = replicated
        self.buffers = buffers
        self._make_optimizer = optimizer

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer, or None; made when it is first asked for, because a stage that is rehearsed needs none."""
        trained = [(name, p) for name, p in self.parameters.items() if p.requires_grad]
        return self._make_optimizer(trained) if self._make_optimizer is not None and trained else None

    @property
    def gradient_buffers(self) -> list[Tensor]:
        """The memory of all gradients that were asked for yet."""
        if self._replicated:
            return [bucket.memory for bucket in self._buckets] if "_buckets" in vars(self) else []
        return list(self._gradients.values())

    @cached_property
    def _buckets(self) -> list[Bucket]:
        return buckets_of(self.parameters.values())

    def gradient_buffer(self, parameter: nn.Parameter) -> Tensor:
        """Where a parameter's gradient is added up, step after step.

        Memory that stays: gradients that came and went between saved tensors would leave holes among these, a quarter
        of the peak on one worker of the benchmark GPT.
        """
        if parameter not in self._gradients and self._replicated:
            for bucket in self._buckets:
                self._gradients |= bucket.gradients
        if parameter not in self._gradients:
            self._gradients[parameter] = torch.empty_like(parameter, memory_format=torch.contiguous_format)
        return self._gradients[parameter]

    def clear_gradients(self) -> None:
        """Leave all parameters without a gradient, until the next one is added."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def reduce_gradients(self, replicas: Backend) -> Reduction:
        """Begin to sum the gradients over all replicas.

        Args:
            replicas: the device's end to them.
        """
        return Reduction(self._buckets, replicas)

    def divide_gradients(self, divisor: Tensor | float) -> None:
        """Divide all gradients, by a number or a scalar tensor where they are."""
        held = [p.grad for p in self.parameters.values() if p.grad is not None]
        on_host = not isinstance(divisor, Tensor) or divisor.device.type == "cpu"
        if held and not (on_host and divisor == 1):
            torch._foreach_div_(held, float(divisor) if on_host else divisor)

    def multiply_gradients(self, factor: Tensor) -> None:
        """Multiply all gradients by a scalar."""
        held = [p.grad for p in self.parameters.values() if p.grad is not None]
        if held:
            torch._foreach_mul_(held, factor.to(held[0].device))

    def step(self) -> None:
        """Step the optimizer."""
        if self.optimizer is not None:
            self.optimizer.step()
