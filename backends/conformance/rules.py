"""The rules of the contract, each a function that all devices of a pipeline run at the same time.

A rule uses only the backend. It raises `BrokenRuleError` if the contract is broken. If a device waits forever, the
examination reports it after a time limit.
"""

import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from zlib import crc32

import torch
from attrs import frozen
from torch import Tensor

from ...core.errors import WorkerError
from ..contract import Handle
from ..kind import BackendKind, dtype_name
from .bench import Bench, BrokenRuleError, expect, payload, same

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
    _wait_for(handle for handle, _, _ in reversed(sums))
    for _, tensor, wanted in sums:
        _expect_sum(bench, tensor, wanted)
    _wait_for(handle for handle, _ in flying)


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


def _wait_for(handles: Iterable[Handle]) -> None:
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
    _wait_for(flying)


def _expect_close(found: Tensor, wanted: Tensor, what: str, devices: int) -> None:
    """Raise BrokenRuleError if a sum is wrong by more than rounding."""
    rounding = 4 * devices * torch.finfo(found.dtype).eps if found.dtype.is_floating_point else 0.0
    far = (found.cpu().to(wanted.dtype) - wanted).abs()
    if bool((far > rounding * (1 + wanted.abs())).any()):
        raise BrokenRuleError(f"{what} is off by {far.max().item():g}")


FAILURE_S = 10.0
"""Most seconds until a device has detected that another one stopped."""


@frozen
class Rule:
    """A rule of the contract.

    Args:
        name: a short name.
        text: the requirement of the contract.
        run: raises BrokenRuleError on a device on which it is broken.
    """

    name: str
    text: str
    run: Callable[[Bench], None]


def keep_order(bench: Bench) -> None:
    """Numbered messages between all pairs, received in turns."""
    me, count = bench.end.device, 24

    def numbered(sender: int, receiver: int, number: int) -> Tensor:
        return torch.tensor([sender, receiver, number], dtype=torch.float32)

    flying = [bench.send([numbered(me, peer, n)], peer) for n in range(count) for peer in bench.others]
    for number in range(count):
        for peer in bench.others:
            handle, (got,) = bench.receive([torch.empty(3)], peer)
            handle.wait()
            if not same(got, numbered(peer, me, number)):
                sender, receiver, found = got.tolist()
                raise BrokenRuleError(
                    f"message {found:g} from device {sender:g} to {receiver:g} arrived where message {number} from "
                    f"device {peer} to {me} was due"
                )
    _wait_for(handle for handle, _ in flying)


def send_first(bench: Bench) -> None:
    """Large messages both ways; no device posts a receive before all of its sends have returned."""
    bench.exchange(
        lambda sender, receiver: [[payload((1 << 20,), torch.float32, sender, receiver)]],
        lambda sender, _: f"the large message from device {sender}",
    )


def receive_first(bench: Bench) -> None:
    """All receives are posted before the first send."""
    me = bench.end.device
    arriving = [(peer, n, *bench.receive([torch.empty(1 + 20_000 * n)], peer)) for peer in bench.others for n in (0, 1)]
    flying = [
        bench.send([payload((1 + 20_000 * n,), torch.float32, me, n)], peer) for peer in bench.others for n in (0, 1)
    ]
    for peer, n, handle, (got,) in arriving:
        handle.wait()
        expect(got, payload((1 + 20_000 * n,), torch.float32, peer, n), f"message {n} from device {peer}")
    _wait_for(handle for handle, _ in flying)


def many_in_flight(bench: Bench) -> None:
    """A hundred messages of mixed sizes for each pair and direction, before the first receive."""
    sizes = (1, 100, 3_000, 20_000)
    found = [payload((size,)) for size in sizes]
    messages = [[found[n % len(sizes)]] for n in range(100)]
    bench.exchange(lambda *_: messages, lambda sender, number: f"message {number} of 100 from device {sender}")


def wait_in_any_order(bench: Bench) -> None:
    """Sends and receives are waited for from the last to the first."""
    me, count = bench.end.device, 8

    def message(sender: int, number: int) -> Tensor:
        return payload((40_000 if number % 3 == 1 else 5,), torch.float32, sender, number)

    flying = [bench.send([message(me, n)], peer) for peer in bench.others for n in range(count)]
    arriving = [(peer, n, *bench.receive([message(peer, n)], peer)) for peer in bench.others for n in range(count)]
    for peer, n, handle, (got,) in reversed(arriving):
        handle.wait()
        expect(got, message(peer, n), f"message {n} from device {peer}, waited for in reverse order")
    _wait_for(handle for handle, _ in reversed(flying))


def move_shapes(bench: Bench) -> None:
    """Messages of several tensors: scalars, empty ones, ones with an odd number of elements."""
    shapes = ((), (1,), (0,), (2, 0, 3), (3, 5, 7), (65_537,))
    together = [payload(shape) for shape in shapes]
    alone = [[payload(shape)] for shape in shapes]
    bench.exchange(lambda *_: [together, *alone], lambda sender, number: f"message {number} from device {sender}")


def move_dtypes(bench: Bench) -> None:
    """Every dtype, bit for bit, alone and mixed."""
    alone = [[payload((3, 11), dtype)] for dtype in bench.dtypes]
    mixed = [payload((7,), dtype) for dtype in bench.dtypes]
    bench.exchange(lambda *_: [*alone, mixed], lambda sender, _: f"a message from device {sender}")


def read_layouts(bench: Bench) -> None:
    """Sent tensors may be non-contiguous, or lazy conjugates."""
    whole = payload((6, 10))
    layouts = {
        "transposed": whole.t(), "every second column": whole[:, ::2], "an expanded row": whole[:1].expand(6, 10),
        "the end of a larger tensor": whole[4:],
        "channels last": payload((2, 3, 4, 5)).to(memory_format=torch.channels_last),
    }  # fmt: skip
    if torch.complex64 in bench.dtypes:
        layouts["a lazy conjugate"] = torch.complex(torch.ones(5), torch.arange(5.0)).conj()
    names = list(layouts)
    bench.exchange(
        lambda *_: [[tensor] for tensor in layouts.values()],
        lambda sender, number: f"{names[number]} from device {sender}",
    )


def release_when_waited(bench: Bench) -> None:
    """A sender overwrites the sent tensor as soon as it has waited; the receivers are late."""
    me, first = bench.end.device, payload((50_000,), torch.float32, 1)
    if me == 0:
        for peer in bench.others:
            handle, (sent,) = bench.send([first.clone()], peer)
            handle.wait()
            sent.zero_()
    else:
        time.sleep(0.05)
        handle, (got,) = bench.receive([first], 0)
        handle.wait()
        expect(got, first, "a tensor that device 0 overwrote after it had waited for the send")


def touch_nothing_else(bench: Bench) -> None:
    """Sent tensors are unchanged, and so is the memory around a receive's buffer."""
    me, message = bench.end.device, payload((100,), torch.float32, 2)
    flying = [bench.send([message.clone()], peer) for peer in bench.others]
    for peer in bench.others:
        around = torch.full((300,), 7.0, device=bench.where)
        bench.end.receive([around[100:200]], peer).wait()
        expect(around[100:200], message, f"a message from device {peer} into a part of a larger tensor")
        if not bool((around[:100] == 7).all() and (around[200:] == 7).all()):
            raise BrokenRuleError(
                f"device {me} received from {peer} into a part of a tensor, and bytes outside it were written"
            )
    for handle, (sent,) in flying:
        handle.wait()
        if not same(sent, message):
            raise BrokenRuleError(f"device {me} sent a tensor, and the backend changed it")


def detect_dead_peers(bench: Bench) -> None:
    """The last device stops while all the others wait for it."""
    me, victim = bench.end.device, bench.end.devices - 1
    if me == victim:
        for peer in bench.others:
            bench.receive([torch.empty(1)], peer)[0].wait()
        time.sleep(0.2)
        if bench.alone:
            os.kill(os.getpid(), signal.SIGKILL)
        bench.end.close(RuntimeError("killed by the conformance suite"))
        return
    bench.send([torch.ones(1)], victim)[0].wait()
    pending = iter(_waits_for(bench, victim))
    for what in ("a receive that was waited for", "a send", "a receive", "a sum"):
        begun = time.monotonic()
        try:
            next(pending)()
        except WorkerError as error:
            # A failed sum need not name the device that stopped.
            if what != "a sum" and not re.search(rf"\b(rank|device) {victim}\b", str(error)):
                raise BrokenRuleError(
                    f"{what} on device {me} raised WorkerError('{error}'), which does not name device {victim}"
                ) from error
        except Exception as error:
            raise BrokenRuleError(
                f"{what} on device {me} raised {type(error).__name__} and not WorkerError: {error}"
            ) from error
        else:
            raise BrokenRuleError(f"{what} on device {me} raised nothing although device {victim} had stopped")
        if time.monotonic() - begun > FAILURE_S:
            raise BrokenRuleError(f"{what} on device {me} took {time.monotonic() - begun:.1f} s to detect it")
    bench.end.close()
    bench.end.close()


def _waits_for(bench: Bench, peer: int) -> Iterator[Callable[[], None]]:
    """A receive from a device that is about to stop; then a send, a receive and a sum after it has stopped."""
    yield partial(_finish, partial(bench.receive, [torch.empty(3)], peer))
    yield partial(_finish, partial(bench.send, [torch.ones(1 << 20)], peer))
    yield partial(_finish, partial(bench.receive, [torch.empty(3)], peer))
    yield lambda: bench.end.all_reduce(torch.ones(3, device=bench.where)).wait()


def _finish(begin: Callable[[], tuple[Handle, Sequence[Tensor]]]) -> None:
    begin()[0].wait()


def _rules() -> Iterator[Rule]:
    yield Rule("order", "messages of a pair and direction arrive in the order in which they were sent", keep_order)
    yield Rule("overlap", "a send returns before its receive is posted, however large it is", send_first)
    yield Rule("early receives", "receives may be posted before the messages are sent", receive_first)
    yield Rule("in flight", "many messages may be in flight at once", many_in_flight)
    yield Rule("waiting", "handles may be waited for in any order", wait_in_any_order)
    yield Rule("shapes", "a message is any number of tensors of any shape, also without elements", move_shapes)
    yield Rule("dtypes", "every dtype that the backend moves arrives bit for bit", move_dtypes)
    yield Rule("layouts", "sent tensors need not be contiguous", read_layouts)
    yield Rule("reuse", "a sent tensor may be overwritten after the wait for its handle", release_when_waited)
    yield Rule("bounds", "a receive writes only its buffers", touch_nothing_else)
    yield Rule("sums", "an all-reduce sums in place, with the same bits on all devices", add_up)
    yield Rule(
        "sums in flight", "several sums may be in flight at once, among messages, and waited for in any order",
        add_up_in_flight,
    )  # fmt: skip
    yield Rule("parts", "a reduce-scatter sums each device's part, an all-gather gives it to all", exchange_parts)
    yield Rule("broadcasts", "a broadcast sends tensors of one device to all others, between sums", reach_all)
    yield Rule("progress", "what all devices started ends without the waits of others", end_without_waits_of_others)
    yield Rule(
        "death", f"a wait for a device that stopped raises WorkerError with its number within {FAILURE_S:g} s",
        detect_dead_peers,
    )  # fmt: skip


RULES = tuple(_rules())
"""All rules; the last one stops a device."""


def rules_of(kind: BackendKind) -> tuple[Rule, ...]:
    """The rules that apply to a backend: all, without the last one if it does not detect dead peers."""
    return RULES if kind.detects_dead_peers else RULES[:-1]
