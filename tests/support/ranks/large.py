"""A model that is too large for one worker, and what trains it.

``large.py reference FOLDER`` writes a checkpoint of it shard by shard, and trains it in one process, from its own
initialisation and from the checkpoint. ``torchrun … large.py ranks FOLDER`` trains it as a pipeline, each rank under a
limit of data that the operating system enforces and that the parameters alone are above. Both leave what they trained
in FOLDER; the ranks write their losses and figures to FOLDER/ranks.<rank>.json.
"""

import functools
import gc
import json
import resource
import sys
import threading
import time
import warnings
from pathlib import Path

import numba  # noqa: F401 - so that the first, short step is planned with the compiled search, too
import panpipe
import torch
import torch.distributed as dist
from panpipe.runtimes.devices.available_memory import data_bytes
from panpipe.runtimes.training.ownership import install
from panpipe.runtimes.weights import weights_from
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from tests.laws.grouped import grouped

WIDTH, LAYERS, ROWS, MICROBATCHES, STEPS, SEED = 1024, 40, 8, 2, 3, 5
MODEL_BYTES = LAYERS * (WIDTH * WIDTH + WIDTH) * 4
LIMIT_BYTES = int(0.92 * MODEL_BYTES)
"""What a rank may take in addition to interpreter, libraries and threads, whatever those take on this machine."""
SHARD = 12
"""Layers in a file of the checkpoint."""
OPTIMIZER = functools.partial(torch.optim.SGD, lr=0.1)


class Chain(nn.Module):
    """Linear layers, each with a way around it; most are frozen, as in fine-tuning.

    So a half of it with its gradients is 55 % of the parameters' bytes at most, and there is a limit between that and
    the whole, with space for a cut that is not in the middle: the measured times decide it.
    """

    def __init__(self, width: int = WIDTH, layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        for number, layer in enumerate(self.layers):
            layer.requires_grad_(number % 20 == 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def make_batch(width: int = WIDTH) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(ROWS, width, generator=generator) for name in ("x", "y")}


def reference(folder: Path) -> None:
    """One process without a limit."""
    from safetensors.torch import save_file

    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    where = {}
    for first in range(0, LAYERS, SHARD):
        file, shard = f"part-{first}.safetensors", {}
        for layer in range(first, min(first + SHARD, LAYERS)):
            generator = torch.Generator().manual_seed(layer)
            shard[f"layers.{layer}.weight"] = torch.randn(WIDTH, WIDTH, generator=generator) * 0.02
            shard[f"layers.{layer}.bias"] = torch.zeros(WIDTH)
        save_file(shard, checkpoint / file)
        where.update(dict.fromkeys(shard, file))
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}), encoding="utf-8")
    for name, weights in {"init": None, "checkpoint": checkpoint}.items():
        with panpipe.empty_weights():
            model = Chain()
        held = {n: nn.Parameter(torch.empty(p.shape), p.requires_grad) for n, p in model.named_parameters()}
        weights_from(weights, model, SEED).fill(held, held.keys())
        install(model, held)
        optimizer = OPTIMIZER([p for p in model.parameters() if p.requires_grad])
        losses = []
        for index in range(STEPS):
            arguments = {"microbatches": MICROBATCHES, "seed": SEED, "index": index}
            losses.append(panpipe.reference_step(model, step, make_batch(), **arguments).item())
            optimizer.step()
        save_file(dict(model.named_parameters()), folder / f"{name}.safetensors")
        (folder / f"{name}.json").write_text(json.dumps(losses), encoding="utf-8")


class Peak:
    """The most data bytes that the system counts for this process, looked at every millisecond."""

    def __init__(self) -> None:
        self.bytes = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._stopped.wait(0.001):
            self.bytes = max(self.bytes, data_bytes())

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()


def ranks(folder: Path) -> None:
    """One rank of the pipeline, under the limit."""
    dist.init_process_group("gloo")
    with panpipe.empty_weights():
        small = Chain(4, 4)
    options = {"optimizer": OPTIMIZER, "microbatches": MICROBATCHES, "seed": SEED}
    peak, found = Peak(), {}
    # Everything that is imported, compiled and started late is there when the limit is set, and threads with their
    # stacks, too: a pipeline has stepped, and is still open.
    pipe = panpipe.pipeline(
        small, step, make_batch(4), **grouped(schedule="1f1b", max_chunks=1, cache=False, **options)
    )  # a plan of an earlier run would import less
    pipe.step(make_batch(4))
    gc.collect()
    base = data_bytes()
    resource.setrlimit(resource.RLIMIT_DATA, (base + LIMIT_BYTES, base + LIMIT_BYTES))
    try:
        Chain()
    except (MemoryError, RuntimeError) as error:
        found["whole"] = str(error)
    pipe.close()
    del pipe, small
    gc.collect()
    peak.bytes = 0
    plan = panpipe.Auto(schedule="1f1b", max_chunks=1)
    for name, weights in {"init": None, "checkpoint": folder / "checkpoint"}.items():
        begun = time.perf_counter()
        with panpipe.empty_weights():
            model = Chain()
        pipe = panpipe.pipeline(model, step, make_batch(), plan=plan, **grouped(weights=weights, **options))
        losses = [pipe.step(make_batch()).item() for _ in range(STEPS)]
        pipe.save(folder / f"{name} trained")
        held = sum(p.nbytes for p in model.parameters() if not p.is_meta)
        found[name] = {"losses": losses, "held": held, "peak": peak.bytes - base, "s": time.perf_counter() - begun}
        plan = pipe.plan
        pipe.close()
        del pipe, model
        gc.collect()
    peak.stop()
    (folder / f"ranks.{dist.get_rank()}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    globals()[sys.argv[1]](Path(sys.argv[2]))
