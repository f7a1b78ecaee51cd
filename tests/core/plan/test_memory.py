"""The memory table, literally, and what holds for any table of this kind."""

from collections import Counter
from collections.abc import Iterable

import pytest
from panpipe.core.actions import COMPUTE_KINDS, Kind
from panpipe.core.costs.costs import StageCosts
from panpipe.core.plan.memory import CHANGES, Change, Memory, Size, Use, changes, order_changes, saved_bytes

WORKSPACE = "start +workspace_bytes, end -workspace_bytes"
MESSAGE = "start +message_bytes, end -message_bytes"
LITERAL = {
    Kind.F: f"start +saved_bytes, start -read_bytes, end +passed_bytes, {WORKSPACE}",
    Kind.B: f"end -saved_bytes, end -read_bytes, end +passed_bytes, {WORKSPACE}",
    Kind.I: f"end -saved_bytes, end +kept_bytes, end -read_bytes, end +passed_bytes, {WORKSPACE}",
    Kind.W: f"end -kept_bytes, {WORKSPACE}",
    Kind.RECOMPUTE: f"start -input_bytes, start +saved_bytes, {WORKSPACE}",
    Kind.SEND_F: MESSAGE,
    Kind.SEND_B: MESSAGE,
    Kind.RECV_F: "start +message_bytes",
    Kind.RECV_B: "start +message_bytes",
    Kind.OFFLOAD: "start +offloaded_bytes host, end -offloaded_bytes",
    Kind.RELOAD: "start +offloaded_bytes, end -offloaded_bytes host",
    Kind.SCATTER_GRAD: "",
    Kind.REDUCE_GRAD: "",
    Kind.REDUCE_TIED: "",
    Kind.SYNC: "",
    Kind.STEP: "",
    Kind.UNSHARD: "start +gathered_bytes",
    Kind.RESHARD: "start -gathered_bytes",
}
USES = {
    Use.SAVED: {Size.SAVED, Size.INPUT, Size.KEPT, Size.OFFLOADED},
    Use.COMMUNICATION: {Size.MESSAGE, Size.READ, Size.PASSED},
    Use.WORKSPACE: {Size.WORKSPACE},
    Use.PARAMETERS: {Size.GATHERED},
}


def text(found: Iterable[Change]) -> str:
    return ", ".join(
        f"{change.moment} {'+' if change.sign > 0 else '-'}{change.size}"
        + (" host" if change.memory is Memory.HOST else "")
        for change in found
    )


def left(*found: Iterable[Change]) -> dict[tuple[Memory, Size], int]:
    total: Counter[tuple[Memory, Size]] = Counter()
    for each in found:
        for change in each:
            total[change.memory, change.size] += change.sign
    return {key: count for key, count in total.items() if count}


@pytest.mark.parametrize("kind", list(CHANGES))
def test_table_lists_changes_of_every_kind(kind: Kind) -> None:
    assert text(changes(kind)) == LITERAL[kind]
    assert all(change.size in USES[change.use] for change in changes(kind))


def test_forward_of_a_stage_that_recomputes_keeps_its_inputs_alone() -> None:
    assert text(changes(Kind.F, recomputes=True)) == LITERAL[Kind.F].replace("+saved_bytes", "+input_bytes")
    for kind in set(CHANGES) - {Kind.F}:
        assert changes(kind, recomputes=True) == changes(kind)


def test_forward_of_a_plan_without_backwards_saves_nothing_and_frees_what_it_read_at_its_end() -> None:
    assert text(changes(Kind.F, forward_only=True)) == f"end -read_bytes, end +passed_bytes, {WORKSPACE}"


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("backward", [(Kind.B,), (Kind.I, Kind.W)])
def test_backward_frees_everything_that_its_microbatch_saved(recomputes: bool, backward: tuple[Kind, ...]) -> None:
    kinds = (Kind.F, *((Kind.RECOMPUTE,) if recomputes else ()), *backward)
    device = (changes(kind, recomputes=recomputes) for kind in kinds)
    assert set(left(*device)) == {(Memory.DEVICE, Size.READ), (Memory.DEVICE, Size.PASSED)}
    order = (order_changes(kind, recomputes=recomputes) for kind in (Kind.F, *backward))
    assert set(left(*order)) == {(Memory.DEVICE, Size.READ), (Memory.DEVICE, Size.PASSED)}


def test_send_and_reload_leave_nothing_allocated() -> None:
    assert left(changes(Kind.SEND_F)) == left(changes(Kind.SEND_B)) == {}
    assert left(changes(Kind.OFFLOAD), changes(Kind.RELOAD)) == {}


def test_saved_bytes_of_a_stage_in_numbers() -> None:
    cost = StageCosts(
        1, 1, 1, saved_bytes=10, freed_by_input_bytes=6, created_by_input_bytes=1, workspace_bytes=99, input_bytes=3
    )
    assert saved_bytes(cost) == {Kind.F: (10, 0), Kind.B: (0, -10), Kind.I: (0, -5), Kind.W: (0, -5)}
    again = {Kind.F: (3, 0), Kind.B: (7, -10), Kind.I: (7, -5), Kind.W: (0, -5)}
    assert saved_bytes(cost, recomputes=True) == again
    assert set(again) == COMPUTE_KINDS
