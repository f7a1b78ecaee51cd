"""Schedule files: our reader and writer against those of torch.distributed.pipelining."""

import csv
import io
import warnings
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from panpipe.core.actions import Kind
from panpipe.core.errors import RequestError
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.registry import find_family
from panpipe.core.schedules.schedule_csv import parse_schedule_csv, schedule_csv

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.distributed.pipelining import schedules as theirs


def load(text, tmp_path, chain):
    """Torch's own loader with its validation and its lowering, which fails on a deadlock; gives its runtime."""
    path = tmp_path / "order.csv"
    path.write_bytes(text.encode())
    runtime = object.__new__(theirs._PipelineScheduleRuntime)
    runtime.pp_group_size = len(text.splitlines())
    runtime._num_stages = len(chain.placement)
    runtime._n_microbatches = chain.microbatches
    runtime._stages = [SimpleNamespace(stage_index_to_group_rank={}, is_first=False, is_last=False)]
    runtime.pipeline_order = {}
    runtime._defer_pp_recv = False
    runtime._load_csv(str(path), format="compute_only")
    return runtime


def rewritten(runtime, tmp_path):
    """What torch's writer makes of a schedule."""
    runtime._dump_csv(str(tmp_path / "again.csv"), format="compute_only")
    return (tmp_path / "again.csv").read_bytes().decode()


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("gpipe", ScheduleProblem(3, 5)),
        ("1f1b", ScheduleProblem(4, 6)),
        ("1f1b", ScheduleProblem(1, 2)),
        ("interleaved-1f1b", ScheduleProblem(3, 7, 2)),
        ("looped", ScheduleProblem(4, 8, 3)),
    ],
)
def test_written_csv_is_loaded_by_torch_unchanged(name, problem, tmp_path):
    schedule = find_family(name).build(problem)
    text = schedule_csv(schedule.device_actions, schedule.placement)
    runtime = load(text, tmp_path, schedule)
    assert [[str(a) for a in runtime.pipeline_order[rank] if a] for rank in range(problem.devices)] == [
        [str(a) for a in actions] for actions in schedule.device_actions
    ]
    assert runtime.stage_index_to_group_rank == dict(enumerate(schedule.placement))
    assert rewritten(runtime, tmp_path) == text


@pytest.mark.parametrize(("devices", "microbatches", "chunks"), [(2, 4, 2), (4, 8, 2), (4, 12, 3), (8, 16, 2)])
def test_interleaved_1f1b_is_torchs_order(devices, microbatches, chunks):
    config = SimpleNamespace(
        n_local_stages=chunks,
        pp_group_size=devices,
        _n_microbatches=microbatches,
        number_of_rounds=microbatches // devices,
        microbatches_per_round=devices,
    )
    build = theirs.ScheduleInterleaved1F1B._calculate_single_rank_operations
    expected = [[str(action) for action in build(config, rank) if action] for rank in range(devices)]
    schedule = find_family("interleaved-1f1b").build(ScheduleProblem(devices, microbatches, chunks))
    assert [[str(action) for action in actions] for actions in schedule.device_actions] == expected


def test_lowered_csv_of_torch_is_read(tmp_path):
    schedule = find_family("interleaved-1f1b").build(ScheduleProblem(2, 4, 2))
    runtime = load(schedule_csv(schedule.device_actions, schedule.placement), tmp_path, schedule)
    runtime._dump_csv(str(tmp_path / "lowered.csv"), format="compute_comms")
    text = (tmp_path / "lowered.csv").read_bytes().decode()
    assert "SEND_F" in text
    read = parse_schedule_csv(text, "lowered.csv")
    assert read.device_actions == schedule.device_actions
    assert read.placement == schedule.placement
    assert read.lowered is not None
    sends = {a for row in read.lowered for a in row if a.kind in (Kind.SEND_F, Kind.SEND_B)}
    receives = {a for row in read.lowered for a in row if a.kind in (Kind.RECV_F, Kind.RECV_B)}
    assert {send.counterpart for send in sends} == receives
    assert all(row == [str(theirs._Action.from_str(word)) for word in row] for row in csv.reader(io.StringIO(text)))
    kept = [
        [word for word in row if "SHARD" not in word and "REDUCE" not in word] for row in csv.reader(io.StringIO(text))
    ]
    assert [[f"{a.stage}{a.kind}{a.microbatch}" for a in row] for row in read.lowered] == kept


def test_groups_are_flattened_and_sharding_is_dropped_with_notes():
    read = parse_schedule_csv("0UNSHARD,0F0,(0F1;0B0)OVERLAP_F_B,0B1,0RESHARD,0REDUCE_GRAD\n", "x")
    assert [str(action) for action in read.device_actions[0]] == ["0F0", "0F1", "0B0", "0B1"]
    assert read.lowered is None
    assert [note.split()[1] for note in read.notes] == ["OVERLAP_F_B", "REDUCE_GRAD", "RESHARD", "UNSHARD"]


@settings(deadline=None)
@given(
    st.sampled_from(["gpipe", "interleaved-1f1b", "looped"]), st.integers(1, 5), st.integers(1, 9), st.integers(1, 3)
)
def test_csv_is_read_as_it_was_written(name, devices, microbatches, chunks):
    schedule = find_family(name).build(ScheduleProblem(devices, microbatches, chunks))
    read = parse_schedule_csv(schedule_csv(schedule.device_actions, schedule.placement), "x")
    assert (read.device_actions, read.placement) == (schedule.device_actions, schedule.placement)
    assert (read.microbatches, read.lowered, read.notes) == (microbatches, None, ())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,1F1junk\n", "x.csv, row 2, column 2: '1F1junk' is not an action"),
        ("0F0,,F0\n", "x.csv, row 1, column 3: 'F0' is not an action"),
        ("0F\n", "x.csv, row 1, column 1: '0F' is not an action: F needs a microbatch"),
        ("0F0>1\n", "'0F0>1' is not an action of this grammar"),
        ("0F٣\n", "is not an action of this grammar"),
        ("0STEP\n", "'0STEP' is not an action of this grammar: it has no STEP"),
        ("0UNSHARD3\n", "'0UNSHARD3' is not an action of this grammar: it has no UNSHARD"),
        ("(0F1;0SEND_F0)OVERLAP_F_B\n", "a group holds F, I, W and B only"),
        ("(0F1;0B0)OVERLAP_F_Bx\n", "x.csv, row 1, column 1: '(0F1;0B0)OVERLAP_F_Bx' is not an action"),
        ("(0F1\n", "x.csv, row 1, column 1: '(0F1' is not an action"),
        ("", "x.csv holds no actions"),
        (",,\n", "x.csv holds no actions"),
        ("0F0\n0B0\n", "x.csv, row 2: 0B0 runs stage 0, which row 1 runs, too"),
        ("0F0\n2F0\n", "x.csv has stage 2 and no stage 1"),
        ("0F0,0SEND_F0\n", "x.csv, row 1: '0SEND_F0' has no peer stage"),
        ("0RECV_F0,0F0\n1F0\n", "x.csv, row 1: '0RECV_F0' has no peer stage"),
    ],
)
def test_wrong_files_are_refused(text, message):
    with pytest.raises(RequestError) as caught:
        parse_schedule_csv(text, "x.csv")
    assert message in str(caught.value)
