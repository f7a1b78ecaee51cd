"""Weights of models on meta: initialised the same under every plan, read from and written to checkpoints, refused."""

import functools
import json

import panpipe
import pytest
import torch
from panpipe.runtimes.batch.example import Example
from panpipe.runtimes.launch.team import ThreadTeam
from panpipe.runtimes.microbatches import split_batch
from panpipe.runtimes.pipeline import Pipeline
from panpipe.runtimes.profile import measured_cluster
from panpipe.runtimes.session import Session
from panpipe.runtimes.trainer import Trainer
from panpipe.runtimes.update.training import Training
from panpipe.runtimes.weights import weights_from
from safetensors.torch import load_file, save_file
from torch import nn

from ...laws.grouped import grouped
from ...support.cuts import captured_once, even_plan
from ...support.models import CASES, Case

F32 = torch.float32
GPT, CONV = "tied gpt with dropout", "batchnorm with a skip"
PLANS = [(2, {}), (3, {}), (2, {"schedule_name": "interleaved-1f1b", "chunks": 2})]


def empty(name: str = GPT) -> nn.Module:
    with panpipe.empty_weights():
        return CASES[name].model(F32)


def pipeline(model: nn.Module, name: str = GPT, devices: int = 2, plan=None, **options):
    case = CASES[name]
    plan = plan or even_plan(captured_once(case, F32, 8, 4), devices, 4)
    return panpipe.pipeline(model, case.step, case.batch(8, F32), **grouped(plan=plan, **{"seed": 7, **options}))


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def filled(model: nn.Module, names) -> dict[str, torch.Tensor]:
    """What a process that holds these parameters initialises them with."""
    held = {name: nn.Parameter(torch.empty(model.get_parameter(name).shape)) for name in names}
    weights_from(None, model, 7).fill(held, held.keys())
    return held


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


# Empty models


# Initialisation


@pytest.mark.parametrize("name", [pytest.param(GPT, marks=pytest.mark.slow), CONV])
def test_initial_values_do_not_depend_on_the_plan(name):
    operators = captured_once(CASES[name], F32, 8, 4)
    found = []
    for devices, options in PLANS:
        model, before = empty(name), torch.get_rng_state()
        pipe = pipeline(model, name, plan=even_plan(operators, devices, 4, **options))
        assert torch.equal(torch.get_rng_state(), before)
        for stage in pipe._session.stage_parameters.values():
            assert_equal({n: p.detach() for n, p in stage.items()}, {n: values(pipe._session.model)[n] for n in stage})
        found.append(values(pipe._session.model))
    for other in found[1:]:
        assert_equal(other, found[0])
    assert_equal(values(pipeline(empty(name), name, seed=7)._session.model), found[0])
    assert not torch.equal(
        next(pipeline(empty(name), name, seed=8)._session.model.parameters()), next(iter(found[0].values()))
    )


def test_a_tied_weight_is_initialised_once_by_the_module_of_its_first_name():
    pipe = pipeline(empty())
    assert pipe._session.model.head.weight is pipe._session.model.embedding.weight
    alone = empty()
    assert torch.equal(pipe._session.model.embedding.weight, filled(alone, ["embedding.weight"])["embedding.weight"])


def test_attention_and_recurrence_initialise_as_their_constructors_do():
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.lstm = nn.MultiheadAttention(8, 2), nn.LSTM(8, 8)

    with panpipe.empty_weights():
        model = Both()
    held = filled(model, [name for name, _ in model.named_parameters()])
    assert held["attention.out_proj.bias"].abs().max() == 0
    assert held["attention.out_proj.weight"].abs().max() <= 8**-0.5
    names = ("attention.out_proj.bias", "lstm.bias_hh_l0")
    assert_equal(filled(model, names), {name: held[name] for name in names})


def test_buffers_on_meta_are_initialised_and_those_with_values_are_kept():
    case = CASES[CONV]
    with torch.device("meta"):
        everything = case.model(F32)
    found = values(pipeline(everything, CONV)._session.model)
    assert torch.equal(found["norms.0.running_var"], torch.ones(4))
    assert found["norms.2.num_batches_tracked"] == 0
    model = empty(CONV)
    model.norms[0].running_mean.fill_(0.25)
    assert_equal(
        {"mean": values(pipeline(model, CONV)._session.model)["norms.0.running_mean"]}, {"mean": torch.full((4,), 0.25)}
    )


# Memory


def storages(pipe: Pipeline) -> list[int]:
    states = pipe._trainer.stages.states.values()
    held = [t for s in states for t in (*s.parameters.values(), *s.gradient_buffers)]
    return [tensor.untyped_storage().nbytes() for tensor in held]


def test_pipeline_has_no_memory_for_parameters_until_values_are_loaded():
    case = CASES[GPT]
    operators = captured_once(case, F32, 8, 4)
    plan = even_plan(operators, 2, 4)
    example = Example(empty(), case.step, split_batch(case.batch(8, F32), 4)[0], operators)
    pipe = Pipeline(Session(Trainer(example, plan, ThreadTeam(2), Training(optimizer=torch.optim.AdamW, seed=7))))
    assert sum(storages(pipe)) == 0
    assert not any("optimizer" in vars(state) for state in pipe._trainer.stages.states.values())
    pipe._session.load(weights_from(None, pipe._session.model, 7))
    assert min(storages(pipe)) > 0
    first = pipe.step(case.batch(8, F32)).item()
    assert first == pipeline(empty(), plan=plan, optimizer=torch.optim.AdamW).step(case.batch(8, F32)).item()


def test_planning_stays_within_the_memory_limit(monkeypatch):
    case = CASES[GPT]
    monkeypatch.setattr(measured_cluster, "bytes_left", lambda: 2 * 1000)
    with pytest.raises(panpipe.InfeasibleError, match="may hold 1000"):
        panpipe.pipeline(empty(), case.step, case.batch(8, F32), microbatches=4, plan=panpipe.Auto(max_chunks=1))


# Checkpoints


@pytest.mark.parametrize("name", [pytest.param(GPT, marks=pytest.mark.slow), CONV])
def test_saved_weights_are_read_under_another_plan(name, tmp_path):
    case = CASES[name]
    pipe = pipeline(empty(name), name, optimizer=torch.optim.SGD)
    pipe.step(case.batch(8, F32))
    pipe.save(tmp_path / "a" / "b")
    wanted = values(pipe._session.model)
    for path in (tmp_path / "a" / "b", tmp_path / "a" / "b" / "model.safetensors.index.json"):
        assert_equal(values(pipeline(empty(name), name, devices=3, weights=path)._session.model), wanted)
    file = tmp_path / "a" / "b" / "model-00001-of-00001.safetensors"
    assert_equal(load_file(file), wanted)  # a tied weight once
    assert {p.name for p in file.parent.iterdir()} == {file.name, "model.safetensors.index.json"}
    real = case.model(F32)
    pipeline(real, name, weights=str(file))  # what is not on meta is read as well
    assert_equal(values(real), wanted)


def test_safetensors_checkpoint_with_other_names_of_tied_weights_and_other_dtypes(tmp_path):
    model = CASES[GPT].model(F32)
    state = {n: t.to(torch.bfloat16).contiguous() for n, t in model.state_dict().items() if n != "embedding.weight"}
    save_file(state, tmp_path / "model.safetensors")
    found = values(pipeline(empty(), weights=tmp_path)._session.model)
    assert_equal(found, {n: t.to(torch.bfloat16).to(F32) for n, t in values(model).items()})


def test_weights_are_exchanged_with_transformers(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, use_cache=False
    )

    def step(model, batch):
        return nn.functional.cross_entropy(model(input_ids=batch["x"]).logits.flatten(0, 1), batch["y"].flatten())

    with panpipe.empty_weights():
        model = LlamaForCausalLM(config)
    case = CASES[GPT]
    pipe = panpipe.pipeline(
        model, step, case.batch(4, F32), microbatches=2, optimizer=torch.optim.SGD, plan=panpipe.Auto(max_chunks=1),
        run=panpipe.Run(weights=model._init_weights),
    )  # fmt: skip
    loss = pipe.step(case.batch(4, F32))
    assert loss.isfinite()
    pipe.save(tmp_path)
    config.save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path)
    assert_equal(dict(again.state_dict()), dict(model.state_dict()))


# What is refused


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale + self.table


def scaled(model: nn.Module | None = None, **options):
    if model is None:
        with panpipe.empty_weights():
            model = Scaled()
    return panpipe.pipeline(model, square, torch.ones(4, 4), **grouped(plan=scaled_plan(), **options))


def square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).pow(2).mean()


@functools.cache
def scaled_plan():
    case = Case(lambda dtype: Scaled(), square, lambda rows, dtype: torch.ones(rows, 4))
    return even_plan(captured_once(case, F32, 4, 2), 2, 2)


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Scaled()


def whole() -> dict[str, torch.Tensor]:
    return {"inner.weight": torch.ones(4, 4), "inner.bias": torch.ones(4), "scale": torch.ones(4)}


def one_line(said: str):
    return pytest.raises(panpipe.RequestError, match=rf"\A[^\n]*{said}[^\n]*\Z")


def test_a_module_without_reset_parameters_is_named():
    with one_line(r"parameter 'scale' is on the meta device.* Scaled has no reset_parameters\(\).*weights=init"):
        scaled()


def test_buffer_on_meta_without_a_value_is_refused_with_the_fix(tmp_path):
    save_file(whole(), tmp_path / "w.safetensors")
    with one_line(r"buffer 'table' is on the meta device.*panpipe\.empty_weights\(\)"):
        scaled(on_meta(), weights=tmp_path / "w.safetensors")

    def init(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.ones_(parameter)

    with one_line(r"init\(module\) of Scaled left buffer 'table' without values.*empty_weights"):
        scaled(on_meta(), weights=init)


def test_incomplete_or_failing_init_function_is_refused():
    with one_line(r"init\(module\) of .* left parameter '.*' without values: it must set all tensors"):
        scaled(weights=lambda module: None)

    def reshape(module: nn.Module) -> None:
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.ones(parameter.numel() + 1)))

    with one_line(r"left parameter '.*' of shape \(\d+,\): it must have values in shape \(4.*\)"):
        scaled(weights=reshape)


@pytest.mark.parametrize("given", [3, ["a"]])
def test_invalid_weights_argument_is_refused(given):
    with one_line(r"weights is .*: give None, the path of a safetensors checkpoint, or a function"):
        scaled(weights=given)


def test_state_dict_as_weights_is_refused_without_printing_it():
    with one_line(r"weights is a dict: load it into the model before"):
        scaled(weights=whole())


CHANGED = {
    "lacks": (lambda t: [t.pop("scale"), t.pop("inner.bias")], r"lacks parameter 'inner\.bias' and 1 more of the 3"),
    "shape": (lambda t: t.update(scale=torch.ones(5)), r"'scale' has shape \(5,\) in '.*' and \(4,\) in the model"),
    "kind": (lambda t: t.update(scale=torch.ones(4).int()), r"'scale' is I32 in '.*' and torch\.float32 in the model"),
    "longer": (
        lambda t: [t.update({f"model.{n}": t.pop(n)}) for n in list(t)],
        r"lacks .* it has them with the prefix 'model\.': give the module",
    ),
    "shorter": (
        lambda t: [t.update({n.removeprefix("inner."): t.pop(n)}) for n in list(t)],
        r"lacks .* and 1 more .* it has them without 'inner\.'",
    ),
}


@pytest.mark.parametrize("change", CHANGED)
def test_weights_of_another_model_are_refused(change, tmp_path):
    tensors = whole()
    CHANGED[change][0](tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with one_line(CHANGED[change][1]):
        scaled(weights=tmp_path)


def test_files_without_a_checkpoint_are_refused(tmp_path):
    path, index = tmp_path / "model.safetensors", tmp_path / "model.safetensors.index.json"
    with one_line("folder '.*' has neither"):
        scaled(weights=tmp_path)
    with one_line("cannot read '.*nothing.safetensors'"):
        scaled(weights=tmp_path / "nothing.safetensors")
    torch.save(whole(), path)
    with one_line(r"was written by torch.save, .*load it into the model before, .*or convert it once"):
        scaled(weights=path)
    path.write_bytes(b"")
    with one_line("is not a whole safetensors file"):
        scaled(weights=path)
    save_file(whole(), path)
    data = path.read_bytes()
    for kept in (20, len(data) - 1):
        path.write_bytes(data[:kept])
        with one_line(r"of \d+ bytes, is not a whole safetensors file"):
            scaled(weights=path)
    path.write_bytes(data.replace(b"[4,4]", b"[4,5]"))
    with one_line("is not a whole safetensors file"):
        scaled(weights=path)
    index.write_text(json.dumps({"weight_map": {"scale": "gone.safetensors"}}), encoding="utf-8")
    with one_line("names 'gone.safetensors', which is not in its folder"):
        scaled(weights=index)
    path.write_bytes(data)
    index.write_text(json.dumps({"weight_map": {"other": "model.safetensors"}}), encoding="utf-8")
    with one_line("says that 'other' is in 'model.safetensors', but that file does not have it"):
        scaled(weights=tmp_path)
    index.write_text("[]", encoding="utf-8")
    with one_line("is not the index of a checkpoint"):
        scaled(weights=tmp_path)


def test_unwritable_folder_is_refused_when_saving(tmp_path):
    pipe = scaled(Scaled())
    (tmp_path / "file").write_text("", encoding="utf-8")
    with one_line("cannot create folder"):
        pipe.save(tmp_path / "file")
    save_file(whole(), tmp_path / "model.safetensors")
    with one_line("has a model.safetensors, which readers would read"):
        pipe.save(tmp_path)
