"""What a refusal says of a step that has too few operators, and of sparse tensors."""

import pytest
import torch
from panpipe.core.capture.export.few_operators import refuse_too_few
from panpipe.core.capture.export.operators import operators_of
from panpipe.core.capture.export.step import capture_step
from panpipe.core.errors import RequestError
from torch import Tensor, nn

X = torch.randn(4, 6)


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))


def captured(step, model=None, batch=X):
    return operators_of(capture_step(model or layers(), step, batch))


def mapped(model: nn.Module, x: Tensor) -> Tensor:
    return torch.func.jvp(model, (x,), (x,))[1].mean()


def chosen(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).mean() if x[0, 0] > 0 else model(-x).mean()


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(-x) if x.mean() > 0 else self.layers(x)


class Checked(nn.Module):
    """A model that looks at its input first, and whose result is transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()
        self.register_buffer("version", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        if x.eq(-1).any():
            x = x + 1
        return self.layers(x).transpose(0, 1)


class Written(nn.Module):
    """Writes its input in place at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).clone()
        z = y.sin().cos().exp()
        y.mul_(z.detach())
        return y


class Packed(nn.Module):
    """A recurrent layer over a packed sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(1, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.full((len(x),), 5)
        packed = nn.utils.rnn.pack_padded_sequence(x[..., None], lengths, batch_first=True)
        return self.layer(packed)[1][0][-1]


@pytest.mark.parametrize(
    ("step", "model", "says"),
    [
        (lambda model, x: model(x).mean(), Packed(),
         "pack_padded_sequence needs the values of its lengths.*into a module of their own.*at most 1 device"),
        (mapped, None, "torch.vmap and torch.func transform.*call the transform inside a module.*at most 1 device"),
        (chosen, None, "needs the value.*Python number or text in the batch"),
        (lambda model, x: model(x).mean(), nn.Sequential(Branching()), "module '0' stays Python on one stage"),
        (lambda model, x: model(x).transpose(0, 1).mean(), Checked(), "needs the value of a tensor.*number or text"),
        (lambda model, x: model(x).mean(), Written(), "written here in place"),
        (lambda model, x: model(x).mean(), nn.Linear(6, 1), "use at most 2 devices"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_line_that_keeps_a_step_whole(step, model, says):
    operators = captured(step, model)
    count = len(operators.graph.nodes)
    with pytest.raises(RequestError, match=f"{count + 1} stages for {count} operators?: .*{says}") as refused:
        refuse_too_few(operators, count + 1, count + 1)
    assert count < 4
    assert __file__ in str(refused.value) or isinstance(model, nn.Linear)
