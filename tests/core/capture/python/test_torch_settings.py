"""Settings around a call: read again before each step, entered again within a capture, or refused."""

import pytest
import torch
from panpipe.core.capture.export.step import capture_step
from panpipe.core.capture.python.torch_settings import (
    SETTINGS,
    torch_settings,
)
from torch import nn

CHANGES = {
    "torch.get_default_dtype()": lambda: torch.set_default_dtype(torch.float64),
    "torch.get_default_device()": lambda: torch.set_default_device("meta"),
    "torch.autocast on the CPU": lambda: torch.set_autocast_enabled("cpu", True),
    "the kernels of torch.nn.attention": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "torch's deterministic algorithms": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "torch.get_float32_matmul_precision()": lambda: torch.set_float32_matmul_precision("high"),
}


@pytest.fixture(autouse=True)
def settings_put_back():
    flash = torch.backends.cuda.flash_sdp_enabled()
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_autocast_enabled("cpu", False)
    torch.backends.cuda.enable_flash_sdp(flash)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("name", CHANGES)
def test_changed_torch_setting_is_detected_by_name(name):
    before = torch_settings()
    CHANGES[name]()
    now = torch_settings()
    assert [key for key, *pair in zip(SETTINGS, before, now, strict=True) if pair[0] != pair[1]] == [name]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_step_is_captured_with_gradients_under_no_grad(mode):
    model, batch = nn.Linear(4, 4), {"x": torch.randn(2, 4)}
    with mode():
        step = capture_step(model, lambda m, b: m(b["x"]).sum(), batch)
        assert not torch.is_grad_enabled()
    assert any(node.meta["val"].requires_grad for node in step.graph.nodes if node.name in step.parameters)
