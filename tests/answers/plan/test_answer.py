"""The answer of ``panpipe plan``: figures from plans that are computed by hand."""

import pytest
from attrs import evolve
from panpipe.answers.plan.answer import PlanAnswer, compute_s, efficiency, plain_plan, reduction_share, shortened_name
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.costs.costs import StageCosts, StageEdge
from panpipe.core.costs.reductions import TensorReductions
from panpipe.core.trace.throughput import StepTotals

from ...support.plans import hosted, leaves, orders, plan_of

COSTS = StageCosts(forward_s=1, backward_input_s=1, backward_weight_s=1, saved_bytes=5, parameter_bytes=100)


def planned(step_s=9.0, costs=COSTS, **changes):
    found = plan_of(
        orders("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"), (0, 1), costs=[costs] * 2, edges=[StageEdge(0, 1, 1, 1)]
    )
    prediction = evolve(found.prediction, step_s=step_s, peak_memory_bytes=(110.0, 105.0), evaluations=7)
    return evolve(found, prediction=prediction, **changes)


def answer(plan=None, **options):
    return PlanAnswer(plan or planned(), (200.0, 200.0), options.pop("work", StepTotals()), **options)


def test_efficiency_is_compute_over_devices_and_step():
    assert compute_s(COSTS) == 3
    assert efficiency(planned()) == pytest.approx(12 / 18)


def test_long_lists_in_names_of_schedules_are_shortened():
    assert shortened_name("zb(order=1,2,3,4)") == "zb(order=1,2,…)"
    assert shortened_name("1f1b") == "1f1b"
    assert shortened_name("a(1,2)") == "a(1,2)"


def test_plain_data_evaluate_again():
    found = plain_plan(planned())
    assert found["device_actions"] == [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
    assert [(stage["index"], stage["device"], stage["nodes"]) for stage in found["stages"]] == [
        (0, 0, ["operator0"]), (1, 1, ["operator1"])
    ]  # fmt: skip
    assert (found["predicted_step_s"], found["evaluations"], found["recompute"]) == (9, 7, [])
    assert found["peak_memory_bytes"] == [110, 105]
    assert not {"offload", "tensor", "shard"} & set(found)


def test_offload_and_tensor_ranks_are_named_only_if_there_are_some():
    plan = planned()
    moved = evolve(plan, memory=evolve(plan.memory, offload=(leaves(0, 16, "0: 0F1 0B0", "1: 0F1 0B1"),)))
    assert plain_plan(moved)["offload"] == [{"stage": 0, "bytes": 16, "microbatches": 2, "storages": 1}]
    reduced = planned(costs=evolve(COSTS, reductions=TensorReductions(1, 1, 8, 8, 0.5, 0.25)))
    split = evolve(reduced, mesh=evolve(reduced.mesh, tensor=2))
    assert plain_plan(split)["tensor"] == 2
    assert plain_plan(split)["tensor_reduction_share"] == pytest.approx(0.25)
    assert reduction_share(planned()) == 0


def test_data_has_the_plan_its_simulated_step_and_the_alternatives():
    found = answer(work=StepTotals(samples=18), fewer=planned(8.0), others=[planned(10.0)]).plain()
    assert found["simulated_step_s"] == 9
    assert found["simulated_peak_memory_bytes"] == pytest.approx([110, 105], abs=3)  # and messages of 1 byte
    assert found["memory_limit_bytes"] == [200, 200]
    assert found["throughput"]["samples_per_s"] == 2
    assert [other["predicted_step_s"] for other in found["runners_up"]] == [10]
    assert found["fewer_devices"] == {"devices": 2, "step_s": 8, "schedule": "by hand"}
    assert answer().plain()["fewer_devices"] is None


def shown(capsys, found):
    found.show()
    return capsys.readouterr().out


def test_text_has_the_figures(capsys):
    text = shown(capsys, answer(work=StepTotals(samples=18, tokens=1800), fewer=planned(8.0)))
    assert "efficiency 66.7%, 7 plans evaluated" in text
    assert "Throughput 2 samples/s, 200 tokens/s" in text
    assert "2 of the 2 devices alone are faster: 8 s a step" in text
    assert "In the simulator" not in text
    assert "Offload" not in text


def test_step_of_the_simulator_is_printed_if_it_differs(capsys):
    assert "In the simulator, where transfers share links, the step takes 9" in shown(capsys, answer(planned(8.0)))
    assert "In the simulator" not in shown(capsys, answer(planned(9.0005)))


def test_offload_is_described(capsys):
    plan = planned()
    plan = evolve(
        plan, memory=evolve(plan.memory, offload=(leaves(0, 4, "0: 0F1 0F1"),)),
        prediction=evolve(plan.prediction, cluster=hosted(plan.prediction.cluster, 1e9)),
    )  # fmt: skip
    text = shown(capsys, answer(plan))
    assert "Offload: 4 B of saved tensors a step to the host and back, of stages 0" in text


@pytest.mark.parametrize(
    ("levels", "words"),
    [
        (("gradients", "optimizer"), "the optimizer of stage 1, gradients and the optimizer of stage 0"),
        (("gradients", "gradients"), "gradients and the optimizer of stages 0 1"),
        (("none", "optimizer"), "the optimizer of stage 1"),
    ],
)
def test_what_replicas_share_is_described(capsys, levels, words):
    plan = planned()
    cluster = fully_connected(4, 200, 1e9, 0.0)
    prediction = evolve(plan.prediction, cluster=cluster)
    plan = evolve(plan, mesh=evolve(plan.mesh, data=2), shard=levels, prediction=prediction)
    assert plain_plan(plan)["shard"] == list(levels)
    assert f"2 replicas share {words}\n" in shown(capsys, answer(plan))


def test_other_plans_are_compared_with_the_best(capsys):
    other = planned(9.9)
    other = evolve(other, prediction=evolve(other.prediction, peak_memory_bytes=(55.0, 50.0)))
    text = shown(capsys, answer(others=[other]))
    assert "The fastest plan, and slower ones with less memory" in text
    assert "+10.0%" in text
    assert "-50.0%" in text


def test_cluster_of_the_plan_is_simulated():
    plan = planned()
    slow = evolve(plan, prediction=evolve(plan.prediction, cluster=fully_connected(2, 10**9, float("inf"), 1.0)))
    assert answer(slow).run.step_s > answer(plan).run.step_s
