"""Models from factories, with the options that a factory may add."""

import json
from typing import Any

import pytest
from panpipe.answers.models import load_model, planned_model
from panpipe.core.analytic.model import model_work
from panpipe.core.cluster.catalog import find_device
from panpipe.core.errors import RequestError

MODULE = """
import torch

def step(model, batch):
    return model(batch["x"]).mean()

def make():
    return torch.nn.Linear(4, 4), step, {"x": torch.zeros(3, 8, 4)}

def sequence_first():
    return *make(), {"batch_dims": {"x": 1}}

def unknown():
    return *make(), {"rows": 1}

def number():
    return *make(), 1

def fails():
    raise ValueError("no\\nweights")

def ends():
    raise SystemExit(7)
"""


@pytest.fixture
def module(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "made_with_options.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return "made_with_options"


@pytest.mark.parametrize(("name", "option"), [("unknown", "'rows'"), ("number", "1")])
def test_unknown_options_of_a_factory_are_refused(module: str, name: str, option: str) -> None:
    with pytest.raises(RequestError, match=f"returned the option {option}: .* a dict with batch_dims"):
        load_model(f"{module}:{name}")


@pytest.mark.parametrize(("name", "what"), [("fails", "ValueError: no weights"), ("ends", "SystemExit: 7")])
def test_factory_that_raises_is_reported_in_one_line_with_its_place(module: str, name: str, what: str) -> None:
    with pytest.raises(RequestError, match=rf"'{module}:{name}' raised {what} in .*{module}.py, line \d+:"):
        load_model(f"{module}:{name}")


@pytest.mark.parametrize("tensor", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_equal_layers_are_captured_once(tensor, tmp_path):
    pytest.importorskip("transformers")
    config = tmp_path / "config.json"
    sizes = {"num_hidden_layers": 6, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    config.write_text(json.dumps({"model_type": "llama", "num_key_value_heads": 2, "vocab_size": 512, **sizes}))
    options = {"batch": 2, "sequence": 32, "empty": True, "tensor": tensor, "by_tokens": tensor > 1}
    whole = planned_model(str(config), 1, **options)
    few = planned_model(str(config), 1, repeat=True, **options)
    assert few.repeated.count == 6
    assert few.sizes == whole.sizes
    assert len(few.operators.graph.nodes) < len(whole.operators.graph.nodes)
    found = few.repeated.expanded(model_work(few.operators))
    device = find_device("A100")
    assert found.on(device) == model_work(whole.operators).on(device)


def test_layers_that_differ_are_all_captured(tmp_path):
    pytest.importorskip("transformers")
    config = tmp_path / "config.json"
    sizes = {"num_hidden_layers": 6, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    kinds = ["sliding_attention", "full_attention"] * 3
    given = {"model_type": "qwen2", "num_key_value_heads": 4, "vocab_size": 512, "layer_types": kinds, **sizes}
    config.write_text(json.dumps(given))
    assert planned_model(str(config), 1, sequence=32, empty=True, repeat=True).repeated is None
