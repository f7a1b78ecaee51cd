"""Programs as users write them, by the default call: values that the step does not read capture nothing again."""

import runpy
import textwrap
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]

_BEGIN = """
import panpipe, torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)

class Output:
    def __init__(self, loss):
        self.loss = loss

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.l0, self.l1, self.out = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x, y):
        h = self.out(torch.tanh(self.l1(torch.tanh(self.l0(x)))))
        return Output(F.mse_loss(h, y))

def batch_of(length=6):
    return {"x": torch.randn(8, length, 4), "y": torch.randn(8, length, 1)}

batch = batch_of()
"""

_LOOP = """
model = Model()
pipe = panpipe.pipeline(model, step, batch, optimizer=torch.optim.SGD, microbatches=2)
"""

_STEPS = "for _ in range(4): loss = pipe.step(batch)"

PROGRAMS = {
    "a global named like an attribute of the model's result": """
        def step(model, batch):
            return model(**batch).loss
        """ + _LOOP + _STEPS,
    "evaluation between steps": """
        def step(model, batch):
            return model(**batch).loss
        """ + _LOOP + """
pipe.step(batch), pipe.evaluate(batch)
captures.clear()
for _ in range(3):
    loss = pipe.step(batch)
    value = pipe.evaluate(batch)
""",
    "globals of the names that the step uses for attributes and variables": """
        def step(model, batch):
            out = model(batch["x"], batch["y"])
            x = out.loss
            return x * 2
        """ + _LOOP + """
for x in range(4):
    y, shape, out = float(x), [x], torch.ones(x + 1)
    loss = pipe.step(batch).item()
""",
    "names of modules that are computed": """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.l0, self.l1, self.out = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1)

            def forward(self, x, y):
                for k in range(2):
                    x = torch.tanh(getattr(self, f"l{k}")(x))
                return Output(F.mse_loss(self.out(x), y))

        l1 = loss = 0.0
        def step(model, batch):
            return model(**batch).loss
        """ + _LOOP + """
for l1 in range(4):
    loss = pipe.step(batch)
""",
    "a GRU": """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.embed, self.gru, self.out = nn.Linear(4, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 1)

            def forward(self, x, y):
                return Output(F.mse_loss(self.out(self.gru(self.embed(x))[0]), y))

        loss = 0.0
        def step(model, batch):
            return model(**batch).loss
        """ + _LOOP + _STEPS,
    "a progress bar, a logger and a timer": """
        import io, logging, time
        from tqdm import tqdm

        log = logging.getLogger("training")
        tqdm.monitor = type("Monitor", (), {"woken": 0.0, "report": lambda self: True})()
        bar = tqdm(total=10, file=io.StringIO())
        def step(model, batch):
            out = model(**batch)
            log.debug("a step of %s", tqdm.monitor)
            return out.loss
        """ + _LOOP + """
for i in range(4):
    began = time.perf_counter()
    loss = pipe.step(batch)
    tqdm.monitor.woken = 10.0 * i  # as its thread does every 10 s
    bar.update()
    seconds = time.perf_counter() - began
""",
}  # fmt: skip


class _Monitor:
    """As tqdm's thread, which sets the time every 10 s."""

    woken = 0.0

    def report(self) -> bool:
        return True


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each export."""
    found: list[int] = []
    export = torch.export.export

    def counted(*args, **kwargs):
        found.append(1)
        return export(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", counted)
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_value_that_the_step_does_not_read_captures_nothing_again(name, tmp_path: Path, captures: list[int]) -> None:
    script, loop = PROGRAMS[name].split(_LOOP)
    file = tmp_path / "train.py"
    file.write_text(_BEGIN + textwrap.dedent(script) + _LOOP + "captures.clear()\n" + loop)
    runpy.run_path(str(file), {"captures": captures})
    assert len(captures) == 0


def test_lora_on_threads_reads_no_state_of_other_libraries(captures: list[int]) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    import panpipe
    from tqdm import tqdm

    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = peft.get_peft_model(
        transformers.LlamaForCausalLM(config), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    )
    tokens = torch.randint(64, (4, 8))
    batch = {"input_ids": tokens, "labels": tokens}
    monitor = tqdm.monitor
    tqdm.monitor = _Monitor()
    try:
        pipe = panpipe.pipeline(model, lambda m, b: m(**b).loss, batch, optimizer=torch.optim.SGD, microbatches=2)
        pipe.step(batch)
        captures.clear()
        for number in range(3):
            tqdm.monitor.woken = 10.0 * number
            pipe.step(batch)
    finally:
        tqdm.monitor = monitor
    assert not captures
