"""Training loops as users write them at module level."""
# ruff: noqa: B007, B020, RUF007 -- as users write

import argparse
import functools
import itertools
import logging
import math
import os
import random
import shutil
import tempfile
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import panpipe
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset
from tqdm import tqdm, trange


def data(count=5, rows=8):
    return [{"x": torch.randn(rows, 6), "y": torch.randint(3, (rows,))} for _ in range(count)]


def classify(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


def mlp():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


# %% most_usual_loop | ranks
class Output:
    def __init__(self, loss, logits):
        self.loss, self.logits = loss, logits


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x, y):
        logits = self.head(torch.relu(self.body(x)))
        return Output(F.cross_entropy(logits, y), logits)


def train_step(model, batch):
    return model(**batch).loss


model = Classifier()
batches = data()
pipe = panpipe.pipeline(model, train_step, batches[0], optimizer=torch.optim.AdamW, microbatches=4)
for batch in batches:
    loss = pipe.step(batch)
    print(f"loss {loss.item():.3f}")


# %% globals_named_as_attributes
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.x, self.model, self.loss = nn.Linear(6, 8), nn.Linear(8, 3), nn.CrossEntropyLoss()
        self.outputs = None

    def forward(self, batch):
        logits = self.model(self.x(batch["x"]).relu())
        return self.loss(logits, batch["y"])


def compute(model, batch):
    return model(batch)


model = Net()
batches = data()
pipe = panpipe.pipeline(model, compute, batches[0], optimizer=torch.optim.SGD, microbatches=4)
losses = []
for step, batch in enumerate(batches):
    x = batch["x"]
    loss = pipe.step(batch).item()
    losses.append(loss)
    outputs, logits, best = x.mean(), loss, min(losses)


# %% lengths_change_and_loss_is_global | may_warn=microbatches of a new shape
class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 20)

    def forward(self, tokens):
        return SimpleNamespace(logits=self.head(torch.tanh(self.mix(self.embed(tokens)))))


def step(model, batch):
    logits = model(batch["tokens"]).logits
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


model = Tagger()
batches = [{k: torch.randint(20, (8, length)) for k in ("tokens", "labels")} for length in (5, 7, 5, 9, 7, 5, 9)]
pipe = panpipe.pipeline(model, step, batches[0], optimizer=torch.optim.AdamW, microbatches=4)
for batch in batches:
    loss = pipe.step(batch)
    logits = loss * 2


# %% evaluation_between_steps | fast
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
train, val = data(6), data(2, rows=6)
pipe = panpipe.pipeline(model, classify, train[0], optimizer=torch.optim.AdamW, microbatches=2)
for epoch in range(3):
    model.train()
    for batch in train[epoch * 2 : epoch * 2 + 2]:
        loss = pipe.step(batch)
    model.eval()
    val_loss = sum(pipe.evaluate(batch).item() for batch in val) / len(val)
    print(epoch, loss.item(), val_loss)


# %% tqdm_bar_with_postfix
def step(model, batch):
    x, y = batch
    return F.mse_loss(model(x), y)


model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
loader = DataLoader(TensorDataset(torch.randn(40, 6), torch.randn(40, 1)), batch_size=8)
pipe = panpipe.pipeline(model, step, next(iter(loader)), optimizer=torch.optim.Adam, microbatches=4)
bar = tqdm(loader, desc="train")
for batch in bar:
    loss = pipe.step(batch)
    bar.set_postfix(loss=loss.item())

# %% tqdm_in_the_step | fast, may_warn=bar
bar = tqdm(total=100)


def step(model, batch):
    loss = F.cross_entropy(model(batch["x"]), batch["y"])
    bar.set_description("step")
    return loss


model = mlp()
batches = data()
pipe = panpipe.pipeline(model, step, batches[0], optimizer=torch.optim.Adam, microbatches=4)
for batch in batches:
    loss = pipe.step(batch)
    bar.update(1)


# %% trange_and_iterators
model = mlp()
batches = itertools.cycle(data(2))
batch = next(batches)
pipe = panpipe.pipeline(model, classify, batch, optimizer=torch.optim.Adam, microbatches=4)
for i in (progress := trange(5, leave=False)):
    batch = next(batches)
    loss = pipe.step(batch)
    if i % 2 == 0:
        progress.set_description(f"{loss:.3f}")

# %% logging_in_the_step | may_warn=logs
logger = logging.getLogger("train")


def step(model, batch):
    logger.debug("batch of %d rows", len(batch["x"]))
    logits = model(batch["x"])
    logger.info("logits %s", tuple(logits.shape))
    return F.cross_entropy(logits, batch["y"])


model = mlp()
batches = data()
pipe = panpipe.pipeline(model, step, batches[0], optimizer=torch.optim.Adam, microbatches=4)
for i, batch in enumerate(batches):
    loss = pipe.step(batch)
    logger.info("step %d loss %.4f", i, loss.item())


# %% print_of_shapes_in_the_step | warns=prints
def step(model, batch):
    logits = model(batch["x"])
    print("logits", logits.shape, logits.dtype)
    return F.cross_entropy(logits, batch["y"])


model = mlp()
batches = data()
pipe = panpipe.pipeline(model, step, batches[0], optimizer=torch.optim.Adam, microbatches=4)
for batch in batches:
    loss = pipe.step(batch)


# %% timers_around_the_loop
model = mlp()
batches = data()
pipe = panpipe.pipeline(model, classify, batches[0], optimizer=torch.optim.Adam, microbatches=4)
times, start = deque(maxlen=3), time.time()
for batch in batches:
    before = time.perf_counter()
    loss = pipe.step(batch)
    times.append(time.perf_counter() - before)
print(f"{time.time() - start:.1f} s, {sum(times) / len(times):.3f} s each")


# %% timer_in_the_step | may_warn=logs
def step(model, batch):
    start = time.time()
    logits = model(batch["x"])
    logging.getLogger("timer").debug("forward took %.3f s", time.time() - start)
    return F.cross_entropy(logits, batch["y"])


model = mlp()
batches = data()
pipe = panpipe.pipeline(model, step, batches[0], optimizer=torch.optim.Adam, microbatches=4)
for batch in batches:
    loss = pipe.step(batch)


# %% timer_class_as_a_context_in_the_step | fast, warns=timer
class Timer:
    def __init__(self):
        self.seconds = defaultdict(float)
        self.name = None

    def __call__(self, name):
        self.name = name
        return self

    def __enter__(self):
        self.start = time.perf_counter()

    def __exit__(self, *error):
        self.seconds[self.name] += time.perf_counter() - self.start


timer = Timer()


def step(model, batch):
    with timer("forward"):
        logits = model(batch["x"])
    with timer("loss"):
        return F.cross_entropy(logits, batch["y"])


model = mlp()
batches = data()
pipe = panpipe.pipeline(model, step, batches[0], optimizer=torch.optim.Adam, microbatches=4)
for batch in batches:
    with timer("step"):
        loss = pipe.step(batch)


# %% closure_of_a_main_function
def main(width=8, smoothing=0.1, epochs=2):
    model = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, width), nn.Linear(width, 3))
    criterion = nn.CrossEntropyLoss(label_smoothing=smoothing)
    batches = data(3)

    def step(model, batch):
        return criterion(model(batch["x"]), batch["y"])

    pipe = panpipe.pipeline(model, step, batches[0], optimizer=torch.optim.AdamW, microbatches=4)
    total = 0.0
    for _ in range(epochs):
        for batch in batches:
            loss = pipe.step(batch)
            total += loss.item()
    return model, total


if __name__ != "imported":
    model, total = main()


# %% dataclass_config
@dataclass
class Config:
    width: int = 8
    beta: float = 0.01
    layers: list = field(default_factory=lambda: [8, 8])
    use_norm: bool = True


class Net(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        sizes = [6, *config.layers]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False))
        self.norm, self.head = nn.LayerNorm(config.width), nn.Linear(config.width, 3)

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(self.norm(x) if self.config.use_norm else x)


config = Config()


def step(model, batch):
    logits = model(batch["x"])
    return F.cross_entropy(logits, batch["y"]) + config.beta * logits.square().mean()


model = Net(config)
batches = data()
pipe = panpipe.pipeline(model, step, batches[0], optimizer=torch.optim.AdamW, microbatches=4)
for batch in batches:
    loss = pipe.step(batch)

# %% argparse_namespace
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1e-2)
parser.add_argument("--alpha", type=float, default=0.5)
parser.add_argument("--steps", type=int, default=5)
args = parser.parse_args([])


def step(model, batch):
    logits = model(batch["x"])
    return F.cross_entropy(logits, batch["y"]) + args.alpha * logits.pow(2).mean()


model = mlp()
batches = data(args.steps)
optimizer = functools.partial(torch.optim.SGD, lr=args.lr, momentum=0.9)
pipe = panpipe.pipeline(model, step, batches[0], optimizer=optimizer, microbatches=4)
for args.step in range(args.steps):
    loss = pipe.step(batches[args.step])

# %% value_of_the_config_that_changes | fast, changes=2
args = SimpleNamespace(beta=0.1)


def step(model, batch):
    logits = model(batch["x"])
    return F.cross_entropy(logits, batch["y"]) + args.beta * logits.pow(2).mean()


model = mlp()
batches = data(6)
pipe = panpipe.pipeline(model, step, batches[0], optimizer=torch.optim.SGD, microbatches=4)
for epoch in range(3):
    args.beta = 0.1 * (epoch + 1)
    for batch in batches[2 * epoch : 2 * epoch + 2]:
        loss = pipe.step(batch)


# %% partial_of_a_step
def general_step(criterion, weight, model, batch):
    return weight * criterion(model(batch["x"]), batch["y"])


model = mlp()
batches = data()
step = functools.partial(general_step, nn.CrossEntropyLoss(), 0.5)
pipe = panpipe.pipeline(model, step, batches[0], optimizer=torch.optim.AdamW, microbatches=4)
for batch in batches:
    loss = pipe.step(batch)


# %% method_of_a_trainer_as_step
class Trainer:
    def __init__(self, model, batches, lr=0.01):
        self.model, self.batches, self.lr = model, batches, lr
        self.criterion, self.history, self.best = nn.CrossEntropyLoss(), [], math.inf

    def training_step(self, model, batch):
        return self.criterion(model(batch["x"]), batch["y"])

    def fit(self):
        optimizer = functools.partial(torch.optim.AdamW, lr=self.lr)
        pipe = panpipe.pipeline(self.model, self.training_step, self.batches[0], optimizer=optimizer, microbatches=4)
        for self.index, batch in enumerate(self.batches):
            loss = pipe.step(batch).item()
            self.history.append(loss)
            self.best = min(self.best, loss)


trainer = Trainer(mlp(), data())
trainer.fit()

# %% lambda_as_step
model = mlp()
batches = [(b["x"], b["y"]) for b in data()]
loss_fn = nn.CrossEntropyLoss()
pipe = panpipe.pipeline(
    model,
    lambda model, batch: loss_fn(model(batch[0]), batch[1]),
    batches[0],
    optimizer=torch.optim.Adam,
    microbatches=4,
)
for x, y in batches:
    loss = pipe.step((x, y))


# %% callable_object_as_step
class Objective:
    def __init__(self, weights):
        self.weights = weights

    def __call__(self, model, batch):
        logits = model(batch["x"])
        return self.weights["ce"] * F.cross_entropy(logits, batch["y"]) + self.weights["l2"] * logits.pow(2).mean()


model = mlp()
batches = data()
objective = Objective({"ce": 1.0, "l2": 0.1})
pipe = panpipe.pipeline(model, objective, batches[0], optimizer=torch.optim.Adam, microbatches=4)
for batch in batches:
    loss = pipe.step(batch)


# %% accumulation_over_batches | fast
model = mlp()
batches = data(6)
accumulate = 3
pipe = panpipe.pipeline(model, classify, batches[0], optimizer=torch.optim.AdamW, microbatches=4)
for i, batch in enumerate(batches):
    loss = pipe.step(batch, update=(i + 1) % accumulate == 0)


# %% average_of_the_weights
model = mlp()
batches = data()
pipe = panpipe.pipeline(model, classify, batches[0], optimizer=torch.optim.AdamW, microbatches=4)
ema = panpipe.weights.ema(pipe, 0.9)
for batch in batches:
    loss = pipe.step(batch)
with ema.applied():
    val = pipe.evaluate(batches[0])


# %% schedule_of_the_learning_rate
def scheduler(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 3) * 0.9**n)


model = mlp()
batches = data()
pipe = panpipe.pipeline(
    model,
    classify,
    batches[0],
    optimizer=torch.optim.AdamW,
    microbatches=4,
    update=panpipe.Update(scheduler=scheduler, clip_norm=0.5),
)
for batch in batches:
    loss = pipe.step(batch)
    print(f"{loss:.3f} {pipe.metrics.grad_norm:.3f}", *(f"{lr:.5f}" for lr in pipe.metrics.learning_rates))


# %% rate_written_into_the_groups
model = mlp()
batches = data()
pipe = panpipe.pipeline(model, classify, batches[0], optimizer=torch.optim.SGD, microbatches=4)
for i, batch in enumerate(batches):
    lr = 0.1 * 0.5 * (1 + math.cos(math.pi * i / len(batches)))
    for optimizer in pipe.optimizers.values():
        for group in optimizer.param_groups:
            group["lr"] = lr
    loss = pipe.step(batch)


# %% groups_by_name
def groups(named):
    named = list(named)
    decay = [p for name, p in named if name.endswith("weight")]
    rest = [p for name, p in named if not name.endswith("weight")]
    return torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0, "lr": 1e-2}])


model = mlp()
batches = data()
pipe = panpipe.pipeline(model, classify, batches[0], optimizer=groups, microbatches=4)
for batch in batches:
    loss = pipe.step(batch)


# %% checkpoint_and_resume
model = mlp()
batches = data()
folder = os.path.join(tempfile.gettempdir(), "laws-" + os.environ.get("MASTER_PORT", str(os.getpid())))
pipe = panpipe.pipeline(model, classify, batches[0], optimizer=torch.optim.AdamW, microbatches=4)
for batch in batches[:2]:
    loss = pipe.step(batch)
pipe.checkpoint(os.path.join(folder, "last"))
for batch in batches[2:]:
    loss = pipe.step(batch)
pipe.resume(os.path.join(folder, "last"))
for batch in batches[2:]:
    again = pipe.step(batch)
shutil.rmtree(folder, ignore_errors=True)


# %% sequences_padded_to_the_longest | few, may_warn=microbatches of a new shape
class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 6)
        self.lstm = nn.LSTM(6, 4, batch_first=True, bidirectional=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.lstm(self.embed(x))[0])


def collate(lengths):
    words = [torch.randint(1, 12, (length,)) for length in lengths]
    x = nn.utils.rnn.pad_sequence(words, batch_first=True)
    return {"x": x, "y": (x % 5).masked_fill(x == 0, -100)}


def step(model, batch):
    loss = F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten(), ignore_index=-100)
    return loss, (batch["y"] != -100).sum()


model = Tagger()
batches = [collate(range(longest - 7, longest + 1)) for longest in (9, 12, 8, 17, 11, 10)]
held_out = [collate(range(longest - 7, longest + 1)) for longest in (13, 8)]
folder = os.path.join(tempfile.gettempdir(), "laws-" + os.environ.get("MASTER_PORT", str(os.getpid())))
pipe = panpipe.pipeline(model, step, batches[0], optimizer=torch.optim.AdamW, microbatches=4)
for number, batch in enumerate(tqdm(batches)):
    loss = pipe.step(batch, update=number % 2 == 1)
    if number == 3:
        pipe.checkpoint(os.path.join(folder, "lengths"))
    scores = [pipe.evaluate(other) for other in held_out[number % 2 :]]
pipe.resume(os.path.join(folder, "lengths"))
for batch in batches[4:]:
    again = pipe.step(batch)
shutil.rmtree(folder, ignore_errors=True)


# %% best_weights_are_kept
model = mlp()
batches = data()
pipe = panpipe.pipeline(model, classify, batches[0], optimizer=torch.optim.SGD, microbatches=4)
best, best_state, patience = math.inf, None, 0
for batch in batches:
    loss = pipe.step(batch).item()
    if loss < best:
        best, best_state, patience = loss, pipe.state_dict(), 0
    else:
        patience += 1
pipe.load_state_dict(best_state)


# %% metrics_that_the_step_returns
def step(model, batch):
    logits = model(batch["x"])
    accuracy = (logits.argmax(-1) == batch["y"]).double().mean()
    return F.cross_entropy(logits, batch["y"]), {"accuracy": accuracy, "norm": logits.detach().norm()}


model = mlp()
batches = data()
pipe = panpipe.pipeline(model, step, batches[0], optimizer=torch.optim.AdamW, microbatches=4)
history = defaultdict(list)
for batch in batches:
    loss = pipe.step(batch)
    for name, value in pipe.metrics.items():
        history[name].append(value)

# %% metrics_by_item | warns=losses
losses, correct = [], 0


def step(model, batch):
    logits = model(batch["x"])
    loss = F.cross_entropy(logits, batch["y"])
    losses.append(loss.item())
    return loss


model = mlp()
batches = data()
pipe = panpipe.pipeline(model, step, batches[0], optimizer=torch.optim.AdamW, microbatches=4)
for batch in batches:
    loss = pipe.step(batch)

# %% running_average_of_the_loss
running = None


model = mlp()
batches = data()
pipe = panpipe.pipeline(model, classify, batches[0], optimizer=torch.optim.AdamW, microbatches=4)
for batch in batches:
    loss = pipe.step(batch).item()
    running = loss if running is None else 0.9 * running + 0.1 * loss


# %% predictions_by_forward
def predict(model, batch):
    return model(batch["x"]).softmax(-1)


model = mlp()
batches = data(4)
pipe = panpipe.pipeline(model, classify, batches[0], optimizer=torch.optim.AdamW, microbatches=4)
for batch in batches:
    loss = pipe.step(batch)
    outputs = pipe.forward(batch, predict)
    accuracy = (outputs.argmax(-1) == batch["y"]).double().mean().item()


# %% weighted_by_the_number_of_tokens
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 12)

    def forward(self, x):
        return self.head(torch.tanh(self.mix(self.embed(x))))


def step(model, batch):
    logits, valid = model(batch["x"]), batch["y"] != -100
    loss = F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten(), ignore_index=-100)
    return loss, valid.sum()


model, batches = Model(), []
for _ in range(5):
    x, y = torch.randint(12, (2, 8, 5))
    batches.append({"x": x, "y": torch.where(torch.rand(8, 5) < 0.3, -100, y)})
pipe = panpipe.pipeline(model, step, batches[0], optimizer=torch.optim.AdamW, microbatches=4)
for batch in batches:
    loss = pipe.step(batch)


# %% validation_in_inference_mode | fast
def predict(model, batch):
    return model(batch["x"]).argmax(-1)


@torch.inference_mode()
def validate(pipe, model, batch):
    model.eval()
    loss = pipe.evaluate(batch).item()
    predicted = pipe.forward(batch, predict)
    model.train()
    return loss, (predicted == batch["y"]).double().mean().item()


model = mlp()
batches = data()
pipe = panpipe.pipeline(model, classify, batches[0], optimizer=torch.optim.AdamW, microbatches=4)
val = validate(pipe, model, data(1)[0])
for batch in batches:
    loss = pipe.step(batch)
    val = validate(pipe, model, batch)


# %% smaller_last_batch | may_warn=microbatches of a new shape
class Points(Dataset):
    def __init__(self, count):
        self.x, self.y = torch.randn(count, 6), torch.randint(3, (count,))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "y": self.y[index]}


loader = DataLoader(Points(21), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(1))
model = mlp()
pipe = panpipe.pipeline(model, classify, next(iter(loader)), optimizer=torch.optim.AdamW, microbatches=4)
for epoch in range(2):
    for batch in loader:
        loss = pipe.step(batch)


# %% gradients_without_an_optimizer
model = mlp()
batches = data(2)
pipe = panpipe.pipeline(model, classify, batches[0], microbatches=4)
for batch in batches:
    loss = pipe.step(batch)


# %% weights_are_clipped_between_steps
def step(model, batch):
    real, fake = model(batch["real"]), model(batch["fake"])
    return fake.mean() - real.mean()


model = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
batches = [{"real": torch.randn(8, 6) + 1, "fake": torch.randn(8, 6)} for _ in range(5)]
pipe = panpipe.pipeline(model, step, batches[0], optimizer=torch.optim.RMSprop, microbatches=4)
for batch in batches:
    loss = pipe.step(batch)
    panpipe.weights.on_parameters(pipe, lambda name, p: p.clamp_(-0.1, 0.1).norm())


# %% seeds_and_environment_as_in_every_script
def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    os.environ["PYTHONHASHSEED"] = str(seed)


set_seed(3)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = mlp().to(device)
criterion = nn.CrossEntropyLoss().to(device)


def step(model, batch):
    inputs, targets = batch["x"].to(device), batch["y"].to(device)
    return criterion(model(inputs), targets)


batches = data()
pipe = panpipe.pipeline(model, step, batches[0], optimizer=torch.optim.AdamW, microbatches=4)
for epoch in range(2):
    random.shuffle(batches)
    for batch in batches[:3]:
        loss = pipe.step(batch)
    np.random.rand()
