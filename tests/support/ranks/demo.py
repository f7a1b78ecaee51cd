"""The demo on a model of two small layers, by a plan whose prediction misses.

A fault changes what the last rank computes, from outside the demo.
"""

import importlib.util
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import torch
from panpipe.core.plan.plan import Plan, plan_json
from panpipe.runtimes.pipeline import Pipeline
from torch import nn

from ..cuts import captured, even_plan
from ..models import Case
from ..plans import predicted

DEMO = Path(__file__).resolve().parents[3] / "examples" / "train_gpt2.py"


def small_demo():
    """The demo's module, with a smaller model and batch."""
    spec = importlib.util.spec_from_file_location("train_gpt2", DEMO)
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    demo.SEQUENCE, demo.ROWS, demo.MICROBATCHES = 8, 4, 2
    demo.make_model = small_model
    demo.standard_library_text = lambda: torch.arange(1000) % 7
    return demo


def small_model() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel  # late: whoever collects tests imports this file

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=8, n_embd=16, n_layer=2, n_head=2, use_cache=False, bos_token_id=0, eos_token_id=0
    )  # fmt: skip
    return GPT2LMHeadModel(config).train()


def overestimated(demo) -> Plan:
    """An even plan of the small model for two devices, which predicts seconds for what takes milliseconds."""
    batch = demo.batches(demo.standard_library_text(), 1)[0]
    case = Case(lambda dtype: small_model(), demo.step, lambda rows, dtype: batch)
    return predicted(even_plan(captured(case, torch.float32, demo.ROWS, demo.MICROBATCHES), 2, demo.MICROBATCHES))


def faulty(fault: str):
    """A step that is wrong on the last rank: in its ``gradient``, by 0.1 % or ``nan``, or its ``loss``."""
    right = Pipeline.step

    def step(self, batch):
        loss = right(self, batch)
        gradient = next(p.grad for p in reversed(list(self._session.model.parameters())) if p.grad is not None)
        if fault == "loss":
            return loss * 1.001
        gradient.mul_(1.001 if fault == "gradient" else float("nan"))
        return loss

    last = os.environ.get("RANK", "1") == "1"
    return mock.patch.object(Pipeline, "step", step if last else right)


def run(out: Path, fault: str | None = None) -> None:
    """The demo's ``main`` on these terms."""
    demo = small_demo()
    plan = out / f"plan-{os.environ.get('RANK', '0')}.json"
    plan.write_text(plan_json(overestimated(demo)), encoding="utf-8")
    arguments = ["train_gpt2.py", "--out", str(out), "--plan", str(plan), "--steps", "4"]
    with mock.patch.object(sys, "argv", arguments), faulty(fault) if fault else nullcontext():
        demo.main()
