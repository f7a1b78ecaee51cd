"""A type of device: its compute rates, memory and links, and the source of each of these numbers."""

from collections.abc import Iterator, Mapping
from typing import Any

from attrs import field, frozen

from ..documents import converter
from ..errors import RequestError
from .sourced import Source, check_numbers, joined, structured

COMPUTE_KINDS = ("matmul", "attention", "convolution")
"""Kinds of operators that are compute-bound: their efficiency is a fraction of the peak FLOP/s."""
MEMORY_KINDS = ("normalisation", "elementwise", "gather")
"""Kinds of operators that are memory-bound: their efficiency is a fraction of the peak memory bandwidth."""
NUMBER_TYPES = ("fp32", "tf32", "fp16", "bf16", "fp8")
"""Number types of matrix products that a device may state a rate for."""

_OPTIONAL = (
    "host_copy_queues", "multiprocessors", "communication_multiprocessors", "sustained", "step_error",
    "fused_attention_efficiency",
)  # fmt: skip
_SHARES = ("efficiency.", "sustained", "step_error", "fused_attention_efficiency")


@frozen
class DeviceType:
    """One type of device. Rates are of dense arithmetic; bytes are decimal.

    Args:
        name: its name in the catalogue.
        title: a name for display.
        peak_flops_per_s: the vendor's FLOP/s, by the number type of a matrix product (``bf16``, ``fp32``, …).
        memory_bytes: all memory of the device.
        reserve_bytes: memory that the driver, its libraries and fragmentation take from a training program.
        peak_memory_bytes_per_s: the vendor's memory bandwidth, bytes read plus bytes written.
        effective_memory_bytes_per_s: the memory bandwidth that a large copy reaches.
        efficiency: by kind of operator, in (0, 1]: for ``COMPUTE_KINDS`` the fraction of the peak FLOP/s that large
            ones reach, for ``MEMORY_KINDS`` the fraction of the peak memory bandwidth. Smaller products and attention
            reach a share of it that follows from their shape, see ``..analytic.shapes``.
        launch_overhead_s: time of an empty operator.
        host_link: the catalogue's link to the host.
        host_copy: the catalogue's link whose effective rate copies to and from host memory reach.
        sources: by the name of each number; for a rate or efficiency ``field.key``, as in ``efficiency.matmul``.
        gpu_link: the catalogue's link to other devices of this type; None if only the host connects them.
        host_copy_queues: in-order queues for copies to and from the host: 1 for both directions, or 2, one for each;
            None if it was not measured which is faster; plans then use 1 (see ``Plan.memory``).
        aliases: other names.
        multiprocessors: number of thread blocks with large tiles that run at once; None for a device without tiles,
            such as a processor core, on which the shape of a product costs no time.
        communication_multiprocessors: how many of them communication kernels occupy; None for 0.
        sustained: the share of these rates of products, attention and convolutions that hours of training reach,
            in (0, 1]: power is limited and hosts cause delays; None for 1, if the efficiencies are of training.
        step_error: relative error of a predicted training step that 9 of 10 steps stay below, in (0, 1); None if
            unknown.
        fused_attention_efficiency: the fraction of the peak FLOP/s that the fastest attention of libraries of fused
            kernels reaches; None if that is the one of ``efficiency``.

    Raises:
        RequestError: a number is missing, out of its range, or has no source.
    """

    name: str
    title: str
    peak_flops_per_s: Mapping[str, float] = field(hash=False)
    memory_bytes: int
    reserve_bytes: int
    peak_memory_bytes_per_s: float
    effective_memory_bytes_per_s: float
    efficiency: Mapping[str, float] = field(hash=False)
    launch_overhead_s: float
    host_link: str
    host_copy: str
    sources: Mapping[str, Source] = field(hash=False)
    gpu_link: str | None = None
    aliases: tuple[str, ...] = ()
    host_copy_queues: int | None = None
    multiprocessors: int | None = None
    communication_multiprocessors: int | None = None
    sustained: float | None = None
    step_error: float | None = None
    fused_attention_efficiency: float | None = None

    def __attrs_post_init__(self) -> None:
        check_numbers(self, "device", self.numbers(), ("reserve_bytes", "launch_overhead_s"))
        for path, value in self.numbers():
            if path.startswith(_SHARES) and (value > 1 or (value == 1 and path == "step_error")):
                raise RequestError(f"{path} of device '{self.name}' is {value}: shares are at most 1, errors below 1")
        kinds = (*COMPUTE_KINDS, *MEMORY_KINDS)
        if sorted(self.efficiency) != sorted(kinds):
            raise RequestError(
                f"efficiency of device '{self.name}' has keys {', '.join(self.efficiency) or 'nothing'}: "
                f"give one for each of {', '.join(kinds)}"
            )
        self._check_rates()
        if self.host_copy_queues not in (None, 1, 2):
            raise RequestError(
                f"host_copy_queues of device '{self.name}' is {self.host_copy_queues}: give 1 for both directions, or "
                "2, one for each"
            )
        taken, all_of = self.communication_multiprocessors, self.multiprocessors
        if taken is not None and (all_of is None or taken >= all_of):
            raise RequestError(
                f"communication_multiprocessors of device '{self.name}' is {taken}: it must be below multiprocessors, "
                f"{all_of if all_of is not None else 'which it lacks'}"
            )
        if self.usable_bytes <= 0:
            raise RequestError(
                f"device '{self.name}' reserves {self.reserve_bytes} of its {self.memory_bytes} bytes: leave some"
            )

    def _check_rates(self) -> None:
        unknown = next((kind for kind in self.peak_flops_per_s if kind not in NUMBER_TYPES), None)
        if unknown is not None or not self.peak_flops_per_s:
            raise RequestError(
                f"peak_flops_per_s of device '{self.name}' is for {unknown or 'nothing'}: give it for some of "
                f"{', '.join(NUMBER_TYPES)}"
            )
        if self.effective_memory_bytes_per_s > self.peak_memory_bytes_per_s:
            raise RequestError(
                f"effective_memory_bytes_per_s of device '{self.name}' is {self.effective_memory_bytes_per_s:g}, above "
                f"its peak of {self.peak_memory_bytes_per_s:g}"
            )

    def large_product_flops_per_s(self, number_type: str) -> float:
        """FLOP/s that large matrix products reach in a number type of ``peak_flops_per_s``."""
        return self.peak_flops_per_s[number_type] * self.efficiency["matmul"]

    @property
    def usable_bytes(self) -> int:
        """Memory that a plan may use: all of it minus the reserve."""
        return self.memory_bytes - self.reserve_bytes

    def numbers(self) -> Iterator[tuple[str, float]]:
        """Every number with its name in ``sources``."""
        yield from ((f"peak_flops_per_s.{kind}", rate) for kind, rate in self.peak_flops_per_s.items())
        for name in ("memory_bytes", "reserve_bytes", "peak_memory_bytes_per_s", "effective_memory_bytes_per_s"):
            yield name, getattr(self, name)
        yield from ((f"efficiency.{kind}", value) for kind, value in self.efficiency.items())
        yield "launch_overhead_s", self.launch_overhead_s
        for name in _OPTIONAL:
            if getattr(self, name) is not None:
                yield name, getattr(self, name)


def structured_device(table: Mapping[str, Any], where: str) -> DeviceType:
    """Build a device type from its table.

    Older files also have ``effective_flops_per_s``, which contradicted the efficiencies and which no prediction used:
    it is ignored.

    Raises:
        RequestError: a field is missing, unknown or wrong.
    """
    known = {key: value for key, value in table.items() if key != "effective_flops_per_s"}
    return structured(known, DeviceType, where)


def _read(value: Any, _: type) -> DeviceType:
    if not isinstance(value, dict):
        raise ValueError(f"{value!r} is not the object of a device type")
    return structured_device(value, f"device type '{value.get('name')}'")


converter.register_structure_hook(DeviceType, _read)
converter.register_unstructure_hook(DeviceType, joined)
