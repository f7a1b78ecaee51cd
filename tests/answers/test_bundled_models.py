"""Bundled models: the published sizes, on meta, with batches as asked for."""

import subprocess
import sys

import pytest
import torch
from panpipe.answers.bundled_models import BUNDLED, make
from panpipe.core.errors import RequestError

PARAMETERS = {
    "gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200,
    "llama-7b": 6_738_415_616, "llama-13b": 13_015_864_320, "llama-70b": 68_976_648_192,
    "gpt3-175b": 174_604_259_328, "llama-3-405b": 405_853_388_800, "bert-large": 335_174_458, "vit-large": 304_326_632,
}  # fmt: skip
"""As the published checkpoints have them."""


@pytest.mark.parametrize("name", BUNDLED)
def test_a_bundled_model_has_the_published_parameters_and_no_memory_for_them(name):
    pytest.importorskip("transformers")
    model, _, batch = make(name, 3)
    parameters = {id(p): p for p in model.parameters()}.values()
    assert sum(p.numel() for p in parameters) == PARAMETERS[name]
    assert all(p.is_meta for p in parameters)
    assert {p.dtype for p in parameters} == {getattr(torch, BUNDLED[name].dtype)}
    assert model.training
    assert all(len(tensor) == 3 for tensor in batch.values())


@pytest.mark.parametrize(
    ("name", "batch", "sequence", "message"),
    [
        ("vit-large", 1, 16, "'vit-large' takes images and no sequence of 16 tokens"),
    ],
)
def test_a_wrong_batch_is_refused(name, batch, sequence, message):
    with pytest.raises(RequestError, match=message):
        make(name, batch, sequence)


def test_missing_transformers_is_reported_with_the_command_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(RequestError, match="which is not installed: pip install 'panpipe\\[examples\\]'"):
        make("gpt2", 1)


def test_a_mistyped_model_is_refused_without_importing_torch():
    commands = (
        ["plan", "--cluster", "8xA100-40GB", "--microbatches", "4", "--model"],
        ["profile", "--model"],
        ["doctor"],
    )
    names = ("llama-7x", "nowhere_at_all:make")
    code = (
        "import sys; from panpipe.cli import main; "
        f"statuses = [main([*command, name]) for command in {commands!r} for name in {names!r}]; "
        "print(*statuses, 'torch' in sys.modules, 'numba' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2"] * 6 + ["False"] * 2
    assert [done.stderr.count(name) > 2 for name in names] == [True, True]
