"""What changes between steps, or is kept within one: equal to untouched eager PyTorch, or refused with the line."""

import dataclasses
import enum
import types

import attrs
import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from ..support.registry import Registry
from . import programs
from .programs import WIDTH, difference, names_a_line, refusal

NEAR = 1e-9
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*relates samples of the batch"),  # of queues, codes and sums; it is true
    pytest.mark.filterwarnings("ignore:microbatches of a new shape"),
    pytest.mark.filterwarnings("ignore:.*the step is captured again for each new value"),
    pytest.mark.filterwarnings("ignore:.*the loss does not depend on it"),
]


def Program(model, step, between=lambda number: None, optimizer=programs.sgd, **options):
    """A program whose batches are vectors of one size, for one capture fewer, and which draws no random numbers."""
    return programs.Program(
        model, step, between=between, optimizer=optimizer, keyed=False, **{"sizes": (4, 4, 4, 4), **options}
    )


def chain(*middle):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(middle or (nn.Tanh(),)), nn.Linear(WIDTH, WIDTH)).double()


def fit(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


def between_layers(cls):
    return Program(chain(cls()), fit)


right, refused = Registry(), Registry()


# Numbers


BETA, TABLE, CONFIG = 1.0, {"kl": 1.0}, types.SimpleNamespace(beta=1.0)


class Mode(enum.Enum):
    L1 = 1
    L2 = 2


@dataclasses.dataclass
class Options:
    """Numbers of an object: in a field, in a variable of its class, by a property and by a method."""

    beta: float = 1.0
    count: int = 0
    shared = 1.0
    values: dict[str, float] = dataclasses.field(default_factory=lambda: {"beta": 1.0})

    @property
    def annealed(self):
        return 1.0 if self.count == 0 else 1.25

    def of_values(self):
        return self.values["beta"]


@right
def numbers_in_every_place():
    """A step in which each batch finds another number changed."""
    TABLE["kl"] = Options.shared = globals()["BETA"] = CONFIG.beta = beta = 1.0
    betas, default, names, options, array, tensor = [1.0], [1.0], {"l2"}, Options(), numpy.ones(3), torch.tensor(1.0)
    mode, other = types.SimpleNamespace(of=Mode.L2), torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)

    def of_closure():
        return beta

    def change_closure():
        nonlocal beta
        beta = 0.8

    def step(m, b, given=1.0, listed=default):
        loss = fit(m, b) if mode.of is Mode.L2 else F.l1_loss(m(b["x"]), b["y"])
        loss = loss + (0.1 * m[0].weight.square().sum() if "l2" in names else 0.0)
        loss = loss * of_closure() * betas[0] * options.beta * options.shared * options.annealed * options.of_values()
        loss = loss * float(array[1]) * tensor.item() * other.param_groups[0]["lr"] * given * listed[0] * step.beta
        return loss * TABLE["kl"] * CONFIG.beta * BETA

    step.beta = 1.0
    changes = (
        lambda: names.discard("l2"),
        lambda: setattr(mode, "of", Mode.L1),
        change_closure,
        lambda: betas.__setitem__(0, 1.25),
        lambda: setattr(options, "beta", 0.8),
        lambda: setattr(Options, "shared", 1.25),
        lambda: options.values.update(beta=0.8),
        lambda: setattr(options, "count", 1),
        lambda: array.__setitem__(1, 0.8),
        lambda: tensor.fill_(1.25),
        lambda: other.param_groups[0].update(lr=0.8),
        lambda: setattr(step, "__defaults__", (1.25, default)),
        lambda: default.__setitem__(0, 0.8),
        lambda: setattr(step, "beta", 1.25),
        lambda: TABLE.update(kl=0.8),
        lambda: globals().update(CONFIG=types.SimpleNamespace(beta=1.25)),
        lambda: globals().update(BETA=0.8),
    )
    return Program(chain(), step, lambda n: changes[n - 1]() if n else None, sizes=(4,) * (len(changes) + 1))


@right
def attribute_of_a_class_and_of_a_module_that_hides_it():
    class Scaled(nn.Module):
        beta = 1.0

        def forward(self, x):
            return x * self.beta

    model = chain(Scaled())
    changes = (lambda: setattr(Scaled, "beta", 2.0), lambda: setattr(model[1], "beta", 3.0), lambda: None)
    return Program(model, fit, lambda n: changes[n - 1]() if n else None)


@right
def mode_of_a_batch_norm_that_is_frozen_later():
    model = chain(nn.BatchNorm1d(WIDTH))

    def between(number):
        model[1].train(number < 2)
        model[1].requires_grad_(number < 2)

    return Program(model, fit, between)


@right
def mode_of_a_network_around_the_step():
    torch.manual_seed(1)
    teacher = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).double().requires_grad_(False).eval()

    def step(model, batch):
        with torch.no_grad():
            wanted = teacher(batch["x"]) if not teacher.training else batch["y"]
        return F.mse_loss(model(batch["x"]), wanted)

    return Program(chain(), step, lambda number: teacher.train(number == 2))


@right
def network_around_the_step_that_is_replaced():
    torch.manual_seed(1)
    held = {"target": nn.Linear(WIDTH, WIDTH).double().requires_grad_(False)}

    def step(model, batch):
        return F.mse_loss(model(batch["x"]), held["target"](batch["x"]))

    def between(number):
        if number == 2:
            held["target"] = nn.Linear(WIDTH, WIDTH).double().requires_grad_(False)

    return Program(chain(), step, between)


@right
def attribute_that_is_added_later():
    model = chain()
    return Program(
        model,
        lambda m, b: fit(m, b) * getattr(m, "beta", 1.0),
        lambda n: setattr(model, "beta", 2.0) if n == 2 else None,
    )


@right
def branch_on_a_list_of_a_tensor_that_is_an_attribute():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.tensor([1.0, 2.0])

        def forward(self, x):
            return x * max(self.scale.tolist())

    model = chain(Scaled())
    return Program(model, fit, lambda n: model[1].scale.fill_(1.0 + n // 3))


@right
def counter_with_a_threshold():
    model = chain()
    model.count = 0
    step = lambda m, b: fit(m, b) * (1.0 if m.count < 3 else 0.1)  # noqa: E731
    return Program(model, step, lambda n: setattr(model, "count", n))


@right
def probability_of_dropout():
    model = chain(nn.Dropout(0.0))
    return Program(model, fit, lambda n: setattr(model[1], "p", 1.0 if n == 3 else 0.0))


@right
def number_in_evaluation():
    model = chain()
    model.beta = 1.0
    step = lambda m, b: fit(m, b) * m.beta  # noqa: E731
    return Program(model, step, lambda n: setattr(model, "beta", 1.0 + n // 2), evaluated=True)


@right
def module_outside_of_the_model():
    criterion = nn.SmoothL1Loss(beta=1.0)
    step = lambda m, b: criterion(m(b["x"]), b["y"])  # noqa: E731
    return Program(chain(), step, lambda n: setattr(criterion, "beta", 1.0 if n < 2 else 0.1))


# Functions, hooks and modules


@right
def function_that_is_replaced():
    config = types.SimpleNamespace(activation=torch.tanh)

    class Middle(nn.Module):
        def forward(self, x):
            return config.activation(x)

    return Program(chain(Middle()), fit, lambda n: setattr(config, "activation", torch.tanh if n < 2 else torch.sin))


@right
def module_without_parameters_that_is_replaced():
    model = chain(nn.ReLU())
    return Program(model, fit, lambda n: setattr(model, "1", nn.GELU()) if n == 2 else None)


@right
def hook_that_is_added_and_removed():
    model, held = chain(), []

    def between(n):
        if n == 1:
            held.append(model[1].register_forward_hook(lambda module, given, result: result * 2))
        if n == 3:
            held.pop().remove()

    return Program(model, fit, between)


# Freezing


def set_trained(module, trained):
    for parameter in module.parameters():
        parameter.requires_grad_(trained)


@right
def layer_that_is_frozen_and_unfrozen():
    model = chain()
    return Program(model, fit, lambda n: set_trained(model[0], n % 2 == 0))


@right
def first_layer_alone_at_first_with_adam():
    model = chain()
    set_trained(model[2], False)
    return Program(model, fit, lambda n: set_trained(model[2], n > 1), lambda named: torch.optim.AdamW(named, lr=0.01))


@right
def one_parameter_of_a_layer_by_its_attribute():
    model = chain()

    def between(n):
        model[2].bias.requires_grad = n not in (1, 2)

    return Program(model, fit, between)


@right
def part_that_thaws_with_groups():
    model = chain()
    set_trained(model[0], False)

    def optimizer(named):
        named = list(named)
        groups = [[p for n, p in named if n.endswith(end)] for end in ("weight", "bias")]
        return torch.optim.SGD(
            [{"params": g, "lr": lr} for g, lr in zip(groups, (0.1, 0.01), strict=True)], momentum=0.9
        )

    return Program(model, fit, lambda n: set_trained(model[0], n > 2), optimizer)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last.weight = self.first.weight
        self.double()

    def forward(self, x):
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


@right
def tied_weight_that_is_frozen():
    model = Tied()
    return Program(model, fit, lambda n: model.first.weight.requires_grad_(n not in (1, 2)))


@right
def tied_weight_that_thaws():
    model = Tied()
    model.first.weight.requires_grad_(False)
    return Program(model, fit, lambda n: model.first.weight.requires_grad_(n > 1))


@right
def buffer_that_is_replaced_before_the_first_evaluation():
    model = chain()
    model.register_buffer("scale", torch.ones(WIDTH, dtype=torch.float64))

    def step(m, b):
        return F.mse_loss(m(b["x"] * m.scale), b["y"])

    return Program(
        model, step, lambda n: setattr(model, "scale", (n + 2.0) * torch.ones_like(model.scale)), evaluated=True
    )


class Adversaries(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.generator, self.discriminator = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.double()


@right
def discriminator_frozen_for_a_part_of_the_step():
    def step(m, b):
        m.discriminator.requires_grad_(False)
        fake = m.generator(b["x"])
        fooled = m.discriminator(fake).square().mean()
        m.discriminator.requires_grad_(True)
        return fooled + m.discriminator(b["y"]).abs().mean() - m.discriminator(fake.detach()).mean()

    return Program(Adversaries(), step)


@right
def discriminator_frozen_by_its_attributes():
    def step(m, b):
        for parameter in m.discriminator.parameters():
            parameter.requires_grad = False
        fooled = m.discriminator(m.generator(b["x"])).square().mean()
        for parameter in m.discriminator.parameters():
            parameter.requires_grad = True
        return fooled

    return Program(Adversaries(), step)


@right
def discriminator_frozen_for_a_part_of_an_evaluated_step():
    return attrs.evolve(discriminator_frozen_for_a_part_of_the_step(), evaluated=True)


@refused
def discriminator_that_stays_frozen():
    def step(m, b):
        m.discriminator.requires_grad_(True)
        real = m.discriminator(b["y"]).abs().mean()
        m.discriminator.requires_grad_(False)
        return real + m.discriminator(m.generator(b["x"])).square().mean()

    return Program(Adversaries(), step, evaluated=True)


@refused
def discriminator_that_is_used_before_it_stays_frozen():
    def step(m, b):
        real = m.discriminator(b["y"]).abs().mean()
        set_trained(m.discriminator, False)
        return real + m.discriminator(m.generator(b["x"])).square().mean()

    return Program(Adversaries(), step)


@refused
def discriminator_that_the_step_unfreezes():
    def step(m, b):
        fake = m.generator(b["x"])
        m.discriminator.requires_grad_(True)
        return m.discriminator(b["y"]).abs().mean() - m.discriminator(fake).mean()

    model = Adversaries()
    set_trained(model.discriminator, False)
    return Program(model, step, lambda n: set_trained(model.discriminator, n % 2 == 1))


@refused
def generator_and_discriminator_that_each_freeze_the_other():
    def step(m, b):
        set_trained(m.generator, True)
        set_trained(m.discriminator, False)
        fooled = m.discriminator(m.generator(b["x"])).square().mean()
        set_trained(m.discriminator, True)
        set_trained(m.generator, False)
        return fooled + (m.discriminator(b["y"]) - m.discriminator(m.generator(b["x"]))).abs().mean()

    return Program(Adversaries(), step)


@refused
def discriminator_that_is_used_before_the_step_unfreezes_it():
    def step(m, b):
        fooled = m.discriminator(m.generator(b["x"])).square().mean()
        m.discriminator.requires_grad_(True)
        return fooled + m.discriminator(b["y"]).abs().mean()

    model = Adversaries()
    set_trained(model.discriminator, False)
    return Program(model, step)


@right
def adversaries_that_take_turns():
    turn = types.SimpleNamespace(of="generator")
    model = Adversaries()

    def step(m, b):
        if turn.of == "generator":
            return m.discriminator(m.generator(b["x"])).square().mean()
        with torch.no_grad():
            fake = m.generator(b["x"])
        return m.discriminator(b["y"]).abs().mean() - m.discriminator(fake).mean()

    def between(n):
        turn.of = ("generator", "discriminator")[n % 2]
        set_trained(model.generator, n % 2 == 0)
        set_trained(model.discriminator, n % 2 == 1)

    return Program(model, step, between)


# Parameters and buffers


@right
def parameter_that_is_written_in_place():
    model = chain()

    def between(n):
        with torch.no_grad():
            model[0].weight.mul_(0.9)

    return Program(model, fit, between)


@right
def parameter_that_gets_other_data():
    model = chain()

    def between(n):
        model[0].weight.data = model[0].weight.data * 0.9

    return Program(model, fit, between)


@right
def tied_weight_that_is_written_in_place():
    model = Tied()

    def between(n):
        with torch.no_grad():
            model.first.weight.mul_(0.9)

    return Program(model, fit, between)


@right
def loaded_state():
    model, other = chain(), chain()
    return Program(model, fit, lambda n: model.load_state_dict(other.state_dict()) if n == 2 else None)


@refused
def state_loaded_by_assignment():
    model, other = chain(), chain()
    return Program(model, fit, lambda n: model.load_state_dict(other.state_dict(), assign=True) if n == 2 else None)


@refused
def parameter_that_is_replaced():
    model = chain()

    def between(n):
        if n == 2:
            model[0].weight = nn.Parameter(torch.zeros(WIDTH, WIDTH, dtype=torch.float64))

    return Program(model, fit, between)


@refused
def layer_that_is_replaced():
    model = chain()
    return Program(model, fit, lambda n: setattr(model, "2", nn.Linear(WIDTH, WIDTH).double()) if n == 2 else None)


@refused
def parametrization_that_is_registered_later():
    model = chain()
    return Program(model, fit, lambda n: parametrizations.weight_norm(model[2]) if n == 2 else None)


@refused
def model_that_is_converted():
    model = chain()

    def step(m, b):
        dtype = m[0].weight.dtype
        return F.mse_loss(m(b["x"].to(dtype)), b["y"].to(dtype))

    return Program(model, step, lambda n: model.float() if n == 2 else None)


@refused
def layer_that_is_added():
    model = chain()
    return Program(model, fit, lambda n: model.append(nn.Linear(WIDTH, WIDTH).double()) if n == 2 else None)


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.ones(WIDTH))
        self.plain = torch.ones(WIDTH, dtype=torch.float64)
        self.double()

    def forward(self, x):
        return x + self.shift * self.plain


@right
def buffer_that_is_written_in_place():
    model = chain(Shifted())
    return Program(model, fit, model[1].shift.fill_)


@right
def buffer_that_is_assigned():
    model = chain(Shifted())
    return Program(
        model, fit, lambda n: setattr(model[1], "shift", torch.full((WIDTH,), float(n), dtype=torch.float64))
    )


@refused
def buffer_that_gets_another_shape():
    model = chain(Shifted())
    return Program(model, fit, lambda n: setattr(model[1], "shift", torch.full((1,), float(n), dtype=torch.float64)))


@right
def plain_tensor_that_is_written_between_steps():
    model = chain(Shifted())
    return Program(model, fit, model[1].plain.fill_)


@right
def plain_tensor_that_is_assigned_between_steps():
    model = chain(Shifted())
    return Program(
        model, fit, lambda n: setattr(model[1], "plain", torch.full((WIDTH,), float(n // 2), dtype=torch.float64))
    )


# A buffer's own value


@right.of(between_layers)
class FirstThenAverage(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("m", torch.zeros(WIDTH))

    def forward(self, x):
        v = x.detach().mean(0)
        if self.m.min() > -1e-5 and self.m.max() < 1e-5:
            self.m = self.m + v
        else:
            self.m = 0.9 * self.m + 0.1 * v
        return x * self.m


@right.of(between_layers)
class BufferSetByTheFirstBatchInPlace(FirstThenAverage):
    def forward(self, x):
        if self.m.abs().sum() == 0:
            self.m.copy_(x.detach().mean(0))
        else:
            self.m.lerp_(x.detach().mean(0), 0.1)
        return x * self.m


@right
def buffer_branch_in_the_step():
    model = chain(FirstThenAverage())
    model.register_buffer("best", torch.full((), 1e9, dtype=torch.float64))

    def step(m, b):
        loss = fit(m, b)
        if loss.item() < m.best.item():
            m.best.copy_(loss.detach())
        return loss * (2.0 if m.best.item() < 1 else 1.0)

    return Program(model, step)


# Tensors that are attributes


@right.of(between_layers)
class PlainTensorThatTheForwardAssigns(nn.Module):
    def __init__(self):
        super().__init__()
        self.t = torch.zeros(WIDTH, dtype=torch.float64)

    def forward(self, x):
        self.t = 0.5 * self.t + x.detach().mean(0)
        return x * self.t


@refused.of(between_layers)
class TensorInAListThatTheForwardWrites(nn.Module):
    def __init__(self):
        super().__init__()
        self.held = [torch.zeros(WIDTH, dtype=torch.float64)]

    def forward(self, x):
        self.held[0].add_(x.detach().mean(0))
        return x * self.held[0]


@refused.of(between_layers)
class TensorInADictThatTheForwardAssigns(nn.Module):
    def __init__(self):
        super().__init__()
        self.held = {"t": torch.zeros(WIDTH, dtype=torch.float64)}

    def forward(self, x):
        self.held["t"] = self.held["t"] + x.detach().mean(0)
        return x * self.held["t"]


@refused.of(between_layers)
class CacheThatIsNoneAtFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.cache = None

    def forward(self, x):
        y = x if self.cache is None else x + self.cache
        self.cache = x.detach().mean(0)
        return y


@right
def feature_that_is_kept_for_the_step():
    class Kept(nn.Module):
        def forward(self, x):
            self.feature = torch.tanh(x)
            return self.feature

    model = chain(Kept())
    return Program(model, lambda m, b: fit(m, b) + m[1].feature.square().mean())


@refused
def closure_tensor_that_the_step_writes():
    total = torch.zeros((), dtype=torch.float64)

    def step(m, b):
        loss = fit(m, b)
        total.add_(loss.detach())
        return loss * total

    return Program(chain(), step)


# What the step changes in Python


@refused.of(between_layers)
class CounterThatTheForwardReads(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.calls


@refused
def counter_that_the_step_branches_on():
    state = types.SimpleNamespace(calls=0)

    def step(m, b):
        state.calls += 1
        return fit(m, b) * (1.0 if state.calls < 4 else 0.5)

    return Program(chain(), step)


@refused
def closure_counter_that_the_step_reads():
    calls = 0

    def step(m, b):
        nonlocal calls
        calls += 1
        return fit(m, b) * calls

    return Program(chain(), step)


@right
def losses_that_the_step_keeps():
    history, meter = [], types.SimpleNamespace(total=0.0)

    def step(m, b):
        loss = fit(m, b)
        history.append(loss.item())
        meter.total += loss.item() * len(b["x"])
        return loss

    return Program(chain(), step)


@pytest.mark.parametrize("make", right.values(), ids=list(right))
@pytest.mark.filterwarnings("default:.*frozen. as in PyTorch they get no gradient")
def test_changes_between_steps_equal_eager(make):
    assert difference(make) < NEAR


@pytest.mark.parametrize("make", refused.values(), ids=list(refused))
def test_unsupported_changes_between_steps_are_refused(make):
    message = refusal(make)
    assert "\n" not in message
    assert names_a_line(message, __file__) or "'" in message


@pytest.mark.parametrize(("name", "words"), [
    ("layer_that_is_replaced", "parameter '2.weight' and 1 more were replaced"),
    ("parametrization_that_is_registered_later", "parameter '2.weight' was replaced by"),
    ("model_that_is_converted", "parameter '0.weight' became torch.float32 and was torch.float64"),
])  # fmt: skip
def test_a_parameter_that_is_replaced_is_refused_by_name_and_time(name, words):
    assert refusal(refused[name]).startswith(f"between steps 2 and 3 {words}")
