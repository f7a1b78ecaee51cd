"""Parameters of which each replica holds a part, on threads over the transport of one process."""

import pytest
import torch
from panpipe.core.errors import RequestError
from panpipe.runtimes.update.buckets import Sharing
from panpipe.runtimes.update.shards import Shards
from panpipe.runtimes.weights.places import deallocate
from panpipe.runtimes.weights.remote_tensors import RemoteTensor

from ...support.stages.sharded import SHAPES, model, on_each

WHOLE = model()


def shards_of(end, count, size=None, parameters=None, own=True):
    sharing = Sharing(lambda: end, end.device, count, frozenset({"tied"}), gradients=True, parameters=True)
    named = model() if parameters is None else parameters
    shards = Shards(named, sharing, size)
    if own:
        shards.shared.own_memory()
    return named, shards


def bytes_of(named):
    with torch._C.DisableTorchFunctionSubclass():
        return sum(parameter.untyped_storage().nbytes() for parameter in named.values())


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("size", [None, 1, 100], ids=["together", "alone", "some"])
def test_parameters_are_whole_within_runs_and_have_no_memory_between(count, size):
    def work(end):
        named, shards = shards_of(end, count, size)
        shared = shards.shared
        views = {name: parameter.detach().view(-1) for name, parameter in named.items() if parameter.is_contiguous()}
        strides = {name: parameter.stride() for name, parameter in named.items()}
        shared.keep_parts()
        assert shared.divided
        assert bytes_of(named) == 0
        assert all(isinstance(parameter, RemoteTensor) for parameter in named.values())
        for _ in range(2):
            gather = shared.gather(end)
            assert gather.bytes == shared.bytes >= sum(p.nbytes for p in WHOLE.values())
            gather.wait()
            for name, parameter in named.items():
                assert type(parameter) is torch.nn.Parameter
                assert torch.equal(parameter, WHOLE[name]), name
                assert parameter.stride() == strides[name]
            assert all(torch.equal(view, WHOLE[name].view(-1)) for name, view in views.items())  # as saved tensors are
            shared.free()
            assert bytes_of(named) == 0
        return sum(bucket.values.numel() for bucket in shards.buckets)

    held = on_each(count, work)
    assert sum(held) >= sum(p.numel() for p in WHOLE.values())
    assert len(set(held)) == 1


def test_optimizer_steps_the_parts():
    def work(end):
        named, shards = shards_of(end, 2)
        shards.shared.keep_parts()
        for part in shards.parts.values():
            assert torch.equal(part.value.flatten(), _slice(WHOLE[part.name], part))
            with torch.no_grad():
                part.value.add_(1.0)
        shards.follow()  # nothing: slices are no views of the parameters
        shards.shared.gather(end).wait()
        return all(torch.equal(parameter, WHOLE[name] + 1.0) for name, parameter in named.items())

    assert on_each(2, work) == [True, True]


def _slice(parameter, part):
    order = parameter.detach().as_strided((parameter.numel(),), (1,))
    return order[part.start : part.stop]


def test_before_parts_are_kept_gathers_leave_the_parameters_as_they_are():
    def work(end):
        named, shards = shards_of(end, 2)
        if end.device:
            with torch.no_grad():
                named["w"].add_(5.0)  # the models of replicas may differ until values are loaded
        shards.shared.gather(end).wait()
        shards.shared.free()
        return named["w"].detach().clone()

    first, second = on_each(2, work)
    assert torch.equal(first, WHOLE["w"])
    assert torch.equal(second, WHOLE["w"] + 5.0)


def test_lent_parameters_may_be_referenced_and_changed_values_are_kept():
    def work(end):
        named, shards = shards_of(end, 2)
        shared = shards.shared
        shared.keep_parts()
        shared.lend(end)
        array = named["w"].detach().numpy()  # such memory cannot be freed
        with torch.no_grad():
            named["b"].fill_(7.0)
        shared.take_back(keep=True)
        assert isinstance(named["w"], RemoteTensor)
        shared.lend(end)
        with torch.no_grad():
            named["b"].fill_(8.0)
        shared.take_back(keep=False)
        shared.gather(end).wait()
        assert torch.equal(named["w"], WHOLE["w"])
        assert (array == WHOLE["w"].detach().numpy()).all()
        return named["b"].tolist()

    assert on_each(2, work) == [[7.0] * 7] * 2


def test_parameters_that_overlap_in_memory_are_refused():
    def work(end):
        with pytest.raises(RequestError, match=r"parameter 'p' has strides \(0, 1\) for shape \(2, 3\): .*dense"):
            shards_of(end, 2, parameters={"p": torch.nn.Parameter(torch.ones(3).expand(2, 3))}, own=False)
        return True

    assert on_each(2, work) == [True, True]


def test_undefined_values_for_a_load_need_no_other_replica():
    def work(end):
        named, shards = shards_of(end, 2)
        shards.shared.keep_parts()
        if end.device == 0:
            shards.shared.lend(None)
            with torch.no_grad():
                for name, parameter in named.items():
                    parameter.copy_(WHOLE[name] * 2)
            shards.shared.take_back(keep=True)
        return {name: part.value.detach().clone() for name, part in shards.parts.items()}

    first, second = on_each(2, work)
    assert torch.equal(first["w"].flatten(), 2 * WHOLE["w"].flatten()[: first["w"].numel()])
    for name in second.keys() - first.keys():
        assert torch.equal(second[name].flatten().sort().values, WHOLE[name].flatten().sort().values)


def test_memory_that_numpy_uses_is_refused_where_it_would_be_freed():
    def work(end):
        named, shards = shards_of(end, 2)
        shards.shared.keep_parts()
        shards.shared.gather(end).wait()
        named["w"].detach().numpy()
        with pytest.raises(RequestError, match=r"the memory of parameter 'w' is used outside of PyTorch, as by .numpy"):
            shards.shared.free()
        return True

    assert on_each(2, work) == [True, True]


def test_parameters_without_memory_get_it_before_values_are_loaded():
    def work(end):
        named = model()
        deallocate(named.values())
        _, shards = shards_of(end, 2, parameters=named, own=False)
        assert bytes_of(named) == 0
        shards.shared.own_memory()
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(WHOLE[name])
        shards.shared.keep_parts()
        with shards.shared.stand_ins():
            assert named["w"].sum() == 0
        assert bytes_of(named) == 0
        shards.shared.gather(end).wait()
        return all(torch.equal(parameter, WHOLE[name]) for name, parameter in named.items())

    assert on_each(2, work) == [True, True]


def test_plans_that_are_compared_leave_the_parameters_where_they_are():
    """Each candidate has its own parts of the same parameters; the one that is chosen gives them memory."""

    def work(end):
        named, chosen = shards_of(end, 2, 1, own=False)
        _, other = shards_of(end, 2, 1, parameters=named, own=False)
        before = {name: parameter.data_ptr() for name, parameter in named.items()}
        for shards in (chosen, other):
            shards.shared.gather(end).wait()
            shards.shared.free()
        assert before == {name: parameter.data_ptr() for name, parameter in named.items()}
        chosen.shared.own_memory()
        chosen.shared.keep_parts()
        for part in chosen.parts.values():
            with torch.no_grad():
                part.value.add_(1.0)
        chosen.shared.gather(end).wait()
        return all(torch.equal(parameter, WHOLE[name] + 1.0) for name, parameter in named.items())

    assert on_each(2, work) == [True, True]


def test_frozen_parameters_are_shared_and_have_no_gradients():
    kept = {"numbers": torch.arange(-5, 6, dtype=torch.int8), "bias": torch.arange(4.0), "none": torch.empty(0)}

    def work(end):
        frozen = {name: torch.nn.Parameter(value.clone(), requires_grad=False) for name, value in kept.items()}
        sharing = Sharing(lambda: end, end.device, 2, gradients=True, parameters=True)
        trained = model()
        shards = Shards(trained, sharing, frozen=frozen)
        shared = shards.shared
        assert set(shards.parts) <= set(trained)
        assert shared.bytes >= sum(p.nbytes for p in (*trained.values(), *frozen.values()))
        shared.own_memory()
        shared.keep_parts()
        assert bytes_of(frozen) == 0
        own = [bucket for bucket in shared.buckets if bucket not in shards.buckets]
        assert sorted(bucket.values.nbytes for bucket in own) == [6, 8]
        assert all(bucket.part.numel() == 0 for bucket in own)
        shared.gather(end).wait()
        return all(torch.equal(frozen[name], value) for name, value in kept.items())

    assert on_each(2, work) == [True, True]


def test_use_between_runs_is_refused():
    def work(end):
        named, shards = shards_of(end, 2)
        shards.shared.keep_parts()
        with pytest.raises(RequestError, match="'w' is held by the replicas, each of which has a part between steps"):
            named["w"].sum()
        return len(shards.names)

    assert on_each(2, work) == [len(SHAPES)] * 2


@pytest.mark.parametrize("lent", [False, True], ids=["between steps", "within whole_parameters"])
@pytest.mark.parametrize("kept", [False, True], ids=["undone", "kept"])
def test_frozen_parameter_that_is_trained_later_leaves_its_bucket(lent, kept):
    """The bucket has three parameters; the others stay frozen together, and then one alone."""
    values = {"fa": torch.randn(3), "fe": torch.zeros(0), "fb": torch.randn(2, 3).t(), "fc": torch.randn(())}

    def work(end):
        frozen = {name: torch.nn.Parameter(value.clone(), requires_grad=False) for name, value in values.items()}
        sharing = Sharing(lambda: end, end.device, 2, gradients=True, parameters=True)
        shards = Shards(model(), sharing, frozen=frozen)
        shared = shards.shared
        shared.own_memory()
        shared.keep_parts()
        before = shared.bytes
        for name in ("fb", "fe", "fa"):
            if lent:
                shared.lend(end)
                frozen["fc"].data.add_(1)
            frozen[name].requires_grad_(True)
            shards.add(name, frozen[name])
            if lent:
                shared.take_back(keep=kept)
            assert bytes_of(frozen) == 0
            assert all(isinstance(each, RemoteTensor) for key, each in frozen.items() if key != "fe" or key == name)
        assert before <= shared.bytes <= before + 4 * 4
        assert sum(bucket in shards.buckets for bucket in shared.buckets) == len(shards.buckets)
        for part in shards.parts.values():
            if part.name in frozen:
                with torch.no_grad():
                    part.value.add_(1)
        shared.gather(end).wait()
        added = {"fa": 1, "fb": 1, "fc": 3 if lent and kept else 0, "fe": 0}
        return all(torch.equal(frozen[name], value + added[name]) for name, value in values.items())

    assert on_each(2, work) == [True, True]
