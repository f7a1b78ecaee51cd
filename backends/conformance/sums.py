"""The rules about sums over all devices, the exchange of parts between them, and broadcasts to them."""

from collections.abc import Sequence
from zlib import crc32

import torch
from torch import Tensor

from ..contract import Handle
from ..kind import dtype_name
from .bench import Bench
from .payload import BrokenRuleError, expect, payload, same

SHAPES = ((), (1,), (3, 5, 7), (65_537,))
NUMBERS = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
)  # fmt: skip
"""The dtypes that the rules sum, if the backend can send them."""


def add_up(bench: Bench) -> None:
    """Sums of every shape and dtype of numbers, each in the middle of a larger tensor."""
    for dtype in NUMBERS:
        for shape in SHAPES if dtype in bench.dtypes else ():
            wanted = _total(bench, shape, dtype)
            count = wanted.numel()
            around = torch.full((count + 20,), 7, dtype=dtype, device=bench.where)
            tensor = around[10 : 10 + count].view(shape)
            tensor.copy_(_addend(bench.end.device, shape, dtype))
            bench.end.all_reduce(tensor).wait()
            _expect_sum(bench, tensor, wanted)
            if not bool((around[:10] == 7).all() and (around[10 + count :] == 7).all()):
                raise BrokenRuleError(
                    f"device {bench.end.device} summed a part of a tensor, and bytes outside it were written"
                )


def add_up_in_flight(bench: Bench) -> None:
    """Sums of several sizes, one after the other, with a message to every device between each two."""
    me, shapes = bench.end.device, [(5,), (40_000,), (1,), (3_000,), (200_000,)]
    sums: list[tuple[Handle, Tensor, Tensor]] = []
    flying, arriving = [], []
    for number, shape in enumerate(shapes):
        tensor = _addend(me, shape, torch.float32, number).to(bench.where)
        sums.append((bench.end.all_reduce(tensor), tensor, _total(bench, shape, torch.float32, number)))
        message = [torch.full((2_000,), float(number))]
        flying += [bench.send(message, peer) for peer in bench.others]
        arriving += [(peer, message, *bench.receive(message, peer)) for peer in bench.others]
    for peer, (sent,), handle, (got,) in arriving:
        handle.wait()
        expect(got, sent, f"a message from device {peer} among sums")
    for handle, _, _ in reversed(sums):
        handle.wait()
    for _, tensor, wanted in sums:
        _expect_sum(bench, tensor, wanted)
    for handle, _ in flying:
        handle.wait()


def reach_all(bench: Bench) -> None:
    """Broadcasts of several tensors from each device, with a sum after each."""
    me = bench.end.device
    for source in range(bench.end.devices):
        wanted = [payload(shape, torch.float32, source) for shape in SHAPES]
        held = [each.to(bench.where) if me == source else torch.ones(each.shape, device=bench.where) for each in wanted]
        bench.end.broadcast(held, source).wait()
        for found, sent in zip(held, wanted, strict=True):
            expect(found, sent, f"a broadcast from device {source}")
        total = torch.ones(3, device=bench.where)
        bench.end.all_reduce(total).wait()
        expect(total, torch.full((3,), float(bench.end.devices)), f"a sum after the broadcast from device {source}")


def exchange_parts(bench: Bench) -> None:
    """Reduce-scatters and all-gathers of every dtype of numbers and several sizes, two in flight."""
    me, count = bench.end.device, bench.end.devices
    for dtype in NUMBERS:
        flying = []
        for rows in (0, 1, 7, 20_011) if dtype in bench.dtypes else ():
            shape = (rows * count,)
            wanted = _total(bench, shape, dtype)
            mine = slice(me * rows, (me + 1) * rows)
            summed = _addend(me, shape, dtype).to(bench.where)
            gathered = torch.zeros_like(summed)
            gathered[mine] = wanted[mine].to(bench.where, dtype)
            handles = bench.end.reduce_scatter(summed), bench.end.all_gather(gathered)
            flying.append((*handles, summed[mine], wanted[mine], gathered, wanted.to(dtype)))
        for sum_of_part, gather, part, total, found, whole in reversed(flying):
            gather.wait()
            sum_of_part.wait()
            what = f"{list(whole.shape)} of {dtype_name(dtype)} on device {me}"
            expect(found, whole, f"an all-gather {what}")
            _expect_close(part, total, f"a reduce-scatter {what}", count)


def end_without_waits_of_others(bench: Bench) -> None:
    """Exchanges of parts and broadcasts for which one device waits before the others do, which first wait for it."""
    me, count = bench.end.device, bench.end.devices
    for first in range(count):
        for rows in (1, 3_000, 200_000):
            parts = [torch.full((rows * count,), float(me), device=bench.where) for _ in range(2)]
            sent = torch.full((rows,), float(me), device=bench.where)
            handles = [
                bench.end.reduce_scatter(parts[0]),
                bench.end.all_gather(parts[1]),
                bench.end.broadcast([sent], first),
            ]
            after = torch.ones(2, device=bench.where)
            if me == first:
                _wait_for(handles)
            bench.end.all_reduce(after).wait()
            if me != first:
                _wait_for(handles)
            expect(after, torch.full((2,), float(count)), f"a sum for which device {first} came last")


def _wait_for(handles: Sequence[Handle]) -> None:
    for handle in handles:
        handle.wait()


def _addend(device: int, shape: tuple[int, ...], dtype: torch.dtype, number: int = 0) -> Tensor:
    """A device's addend: random numbers, so that rounding makes the sum depend on the order of addition."""
    generator = torch.Generator().manual_seed(crc32(repr((device, shape, number)).encode()))
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(-1_000_000, 1_000_000, shape, generator=generator, dtype=torch.int64).to(dtype)


def _total(bench: Bench, shape: tuple[int, ...], dtype: torch.dtype, number: int = 0) -> Tensor:
    """The sum, in float64 or int64."""
    wide = torch.float64 if dtype.is_floating_point else torch.int64
    return torch.stack([_addend(d, shape, dtype, number).to(wide) for d in range(bench.end.devices)]).sum(0)


def _expect_sum(bench: Bench, found: Tensor, wanted: Tensor) -> None:
    """Raise BrokenRuleError if a sum is wrong by more than rounding, or differs between devices."""
    what = f"a sum {list(wanted.shape)} of {dtype_name(found.dtype)} on device {bench.end.device}"
    _expect_close(found, wanted, what, bench.end.devices)
    here = found.clone()
    flying = [bench.end.send([here], peer) for peer in bench.others]
    for peer in bench.others:
        handle, (there,) = bench.receive([here], peer)
        handle.wait()
        if not same(there, here):
            raise BrokenRuleError(f"{what} differs in bits from that on device {peer}")
    for handle in flying:
        handle.wait()


def _expect_close(found: Tensor, wanted: Tensor, what: str, devices: int) -> None:
    """Raise BrokenRuleError if a sum is wrong by more than rounding."""
    rounding = 4 * devices * torch.finfo(found.dtype).eps if found.dtype.is_floating_point else 0.0
    far = (found.cpu().to(wanted.dtype) - wanted).abs()
    if bool((far > rounding * (1 + wanted.abs())).any()):
        raise BrokenRuleError(f"{what} is off by {far.max().item():g}")
