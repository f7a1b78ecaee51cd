"""Which storages a stage saves, what they are called, and which of them can leave."""

import pytest
import torch
from attrs import evolve
from panpipe.core.actions import parse_action
from panpipe.core.capture.export.operators import operators_of
from panpipe.core.capture.export.step import capture_step
from panpipe.core.errors import RequestError
from panpipe.core.offload.storages import SMALLEST_BYTES
from panpipe.core.plan.memory_policy import HostCopy, StageOffload, Storage
from panpipe.runtimes.offload.offloadable import kept_storages, offloadable_storages, offloaded_storages, reason_to_keep
from panpipe.runtimes.programs.compiled import compile_stages
from torch import nn
from torch.nn import functional as F

from ...support.cuts import captured_once, even_plan
from ...support.models import CASES, PYTHON
from ...support.offloading import all_away

F32 = torch.float32
APART, TOGETHER = (0, 1), (0, 0)


def compiled_of(case, stages=2):
    operators = captured_once(case, F32, 8, 4)
    plan = even_plan(operators, stages, 4)
    return compile_stages(operators, [stage.nodes for stage in plan.stages], range(stages))


@pytest.mark.parametrize("name", CASES)
def test_storages_are_all_saved_bytes_once_and_named_once(name):
    for programs in compiled_of(CASES[name]).programs.values():
        found = programs.storages
        assert sum(storage.bytes for storage in found) == programs.memory.saved
        assert len({storage.name for storage in found}) == len(found)
        places = [place for storage in found for place in storage.places]
        assert len(set(places)) == len(places)


def test_storages_are_named_by_captured_values():
    compiled = compiled_of(CASES["tied gpt with dropout"])
    for programs in compiled.programs.values():
        origins = [storage.origin for storage in programs.storages]
        assert sum(origin in compiled.operators.nodes for origin in origins) == len(origins)


def test_views_are_one_storage_whether_or_not_their_base_is_saved():
    def step(model, batch):
        y = model(batch)
        return (y.t() @ y).pow(2).mean()  # both factors show what the layer returned

    model = nn.Linear(8, 8)
    operators = operators_of(capture_step(model, step, torch.ones(4, 8)))
    compiled = compile_stages(operators, [[node.name for node in operators.graph.nodes]], [0])
    linear = next(s for s in compiled.programs[0].storages if s.origin is not None and s.origin.startswith("linear"))
    assert linear.bytes == 4 * 8 * 4
    assert sum(storage.origin == linear.origin for storage in compiled.programs[0].storages) == 1


def test_what_is_sent_on_or_came_from_the_same_device_stays():
    compiled = compiled_of(CASES["batchnorm with a skip"])
    sent = [s for s in compiled.programs[0].storages if "sends it on" in reason_to_keep(s, 0, compiled, APART)]
    assert sent  # the start of the skip, which the trunk's first layer saves, too
    came = [s for s in compiled.programs[1].storages if s.boundary]
    assert came
    assert not any(reason_to_keep(storage, 1, compiled, APART) for storage in came)
    assert all("same device" in reason_to_keep(storage, 1, compiled, TOGETHER) for storage in came)


def test_what_python_reads_and_its_ticket_stay():
    compiled = compiled_of(PYTHON)
    held = [s for programs in compiled.programs.values() for s in programs.storages if "stays Python" in s.held]
    assert {8} < {storage.bytes for storage in held}  # the ticket of a region, and what it read


def test_small_storages_stay():
    compiled = compiled_of(CASES["tied gpt with dropout"])
    assert offloadable_storages(0, compiled, APART) == ()
    assert {why for _, why in kept_storages(0, compiled, APART)} >= {f"it is smaller than {SMALLEST_BYTES} bytes"}


def test_a_plan_that_names_what_stays_is_refused():
    compiled = compiled_of(CASES["batchnorm with a skip"])
    operators = captured_once(CASES["batchnorm with a skip"], F32, 8, 4)
    plan = even_plan(operators, 2, 4)
    sent = next(s for s in compiled.programs[0].storages if s.held)
    copies = (HostCopy(0, parse_action("0F1"), parse_action("0F1")),)
    plan = with_offload(plan, StageOffload(0, (Storage(sent.name, sent.bytes),), copies))
    with pytest.raises(RequestError, match=f"offloads '{sent.name}' of stage 0, which stays on its device"):
        offloaded_storages(plan, 0, compiled, known=True)
    assert not offloaded_storages(plan, 0, compiled)  # of another shape it stays


def test_operators_of_a_graph_stand_for_what_they_are_the_first_to_save(monkeypatch):
    monkeypatch.setattr("panpipe.runtimes.offload.offloadable.SMALLEST_BYTES", 1)
    case = CASES["tied gpt with dropout"]
    compiled, operators = compiled_of(case), captured_once(case, F32, 8, 4)
    plan = even_plan(operators, 2, 4)
    copies = (HostCopy(0, parse_action("1B0"), parse_action("1B0")),)
    everything = tuple(Storage(node, 1) for node in plan.stages[0].nodes)
    named = offloaded_storages(with_offload(plan, StageOffload(0, everything, copies)), 0, compiled, known=True)
    wanted = [s for s in compiled.programs[0].storages if not reason_to_keep(s, 0, compiled, plan.placement)]
    assert sum(s.bytes for s in named) >= 0.9 * sum(s.bytes for s in wanted)


def with_offload(plan, *offload):
    return evolve(plan, memory=evolve(plan.memory, offload=offload))


def test_all_away_of_a_test_is_what_may_leave():
    case = CASES["tied gpt with dropout"]
    operators = captured_once(case, F32, 8, 4)
    plan = all_away(even_plan(operators, 2, 4, "gpipe"), operators)
    assert [each.stage for each in plan.memory.offload] == [0, 1]


def test_dropout_keeps_no_key_among_its_storages():
    def step(model, batch):
        return F.dropout(model(batch), 0.5).pow(2).mean()

    operators = operators_of(capture_step(nn.Linear(8, 8).train(), step, torch.ones(4, 8)))
    compiled = compile_stages(operators, [[node.name for node in operators.graph.nodes]], [0])
    assert compiled.programs[0].inputs.random
    assert not any(storage.bytes == 24 for storage in compiled.programs[0].storages)  # three int64
