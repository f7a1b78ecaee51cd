"""The latest times: no device ends later, and every action is as late as what reads it allows."""

import attrs
from hypothesis import given
from hypothesis import strategies as st
from panpipe.core.costs.costs import StageCosts, StageEdge
from panpipe.core.evaluate.reference import evaluate, latest_times
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.registry import find_family


def times(name, devices, microbatches, chunks=1, hop=0.0, costs=None, recompute=()):
    schedule = find_family(name).build(ScheduleProblem(devices, microbatches, chunks))
    costs = costs or [StageCosts(1, 1, 1)] * len(schedule.placement)
    edges = [StageEdge(stage, stage + 1, 1, 1) for stage in range(len(costs) - 1)]
    arguments = {"edges": edges, "hop_s": hop, "recompute": recompute}
    result = evaluate(schedule.device_actions, schedule.placement, costs, **arguments)
    latest = latest_times(schedule.device_actions, schedule.placement, costs, result, **arguments)
    return schedule, result, latest


def test_forwards_of_gpipe_wait_for_nothing_on_the_last_device_and_may_wait_on_the_first():
    _, result, (starts, ends) = times("gpipe", 2, 2)
    # Device 0: 0F0 0F1 0B0 0B1. Device 1 runs 1F0 at 1, 1F1 at 2, 1B0 at 3, 1B1 at 5; device 0 ends at 9.
    assert result.ends[0] == (1, 2, 7, 9)
    assert ends[0] == (1, 2, 7, 9)
    assert starts[1] == (1, 2, 3, 5)


def test_last_backward_sets_the_latest_forward():
    costs = [StageCosts(1, 1, 1), StageCosts(4, 4, 4)]
    _, result, (starts, _) = times("1f1b", 2, 3, costs=costs)
    assert starts[0][1] > result.starts[0][1]  # 0F1 runs ahead of 1B0, which takes 8


@given(
    st.sampled_from(["gpipe", "1f1b", "zb-h1", "gis-h", "interleaved-1f1b"]),
    st.integers(2, 4),
    st.integers(2, 8),
    st.sampled_from([0.0, 0.25]),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_latest_times_keep_every_dependency_and_every_end(name, devices, count, hop, again, random):
    chunks = find_family(name).usual_chunks
    costs = [
        StageCosts(*(random.choice([0.5, 1.0, 2.0]) for _ in range(3)), recompute_s=0.5)
        for _ in range(devices * chunks)
    ]
    recompute = (1,) if again else ()
    schedule, result, (starts, ends) = times(name, devices, count, chunks, hop, costs, recompute)
    for device, order in enumerate(schedule.device_actions):
        assert ends[device][-1] == result.ends[device][-1]
        assert all(late >= early - 1e-9 for late, early in zip(starts[device], result.starts[device], strict=True))
        before = [0.5 if a.stage in recompute and a.kind in ("B", "I") else 0.0 for a in order]
        gaps = zip(ends[device], starts[device][1:], before[1:], strict=False)
        assert all(end <= start - again_s + 1e-9 for end, start, again_s in gaps)
    # Run as late as that, nothing has to wait: fixing the starts by pauses gives the same ends.
    at = {a: (starts[d][i], ends[d][i]) for d, order in enumerate(schedule.device_actions) for i, a in enumerate(order)}
    for action, (start, _) in at.items():
        if action.kind == "F" and action.stage:
            source = attrs.evolve(action, stage=action.stage - 1)
            delay = hop if schedule.placement[action.stage] != schedule.placement[action.stage - 1] else 0.0
            assert at[source][1] + delay <= start + 1e-9
