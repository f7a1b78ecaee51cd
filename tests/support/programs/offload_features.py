"""Features of training on a pipeline whose saved tensors leave, or stay: what each computes, to the last bit."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

import panpipe
import torch
from attrs import evolve, frozen
from panpipe.runtimes.launch.team import Team
from panpipe.runtimes.offload.tier import OffloadTier
from panpipe.runtimes.pipeline import Pipeline
from panpipe.runtimes.programs.compiler_choice import CompilerChoice
from panpipe.runtimes.programs.stage_compiler import StageCompiler
from panpipe.runtimes.update.training import Training

from ..cuts import captured_once, even_plan, programs_of
from ..models import CASES, PYTHON, Case, tokens
from ..offloading import all_away
from ..parity import OPTIMIZER, PLANS
from ..ranks.scaling_ranks import LOWER
from ..ranks.teams import pipeline_on
from ..registry import Registry
from .scaling import LAYERS, TAPPED, Scaler, tapped_batch

F32 = torch.float32
ROWS, MICROBATCHES = 12, 4
GPT, CONV = CASES["tied gpt with dropout"], CASES["batchnorm with a skip"]

FEATURES = Registry()
"""Name → a function of a `Setting` that trains and returns what it found."""


@frozen
class Setting:
    """How pipelines are built.

    Args:
        team: the devices; it outlives the pipelines.
        folder: for checkpoints, and for the file of saved tensors.
        to: ``"host"`` or ``"file"``, where all saved tensors go that can; None keeps them.
        plan: its name in ``PLANS``.
        queues: host-copy queues of a device.
        shard: what replicas share.
    """

    team: Team
    folder: Path
    to: str | None = None
    plan: str = "gpipe"
    queues: int = 1
    shard: str = "none"

    @contextmanager
    def pipeline(self, case: Case, training: Training | None = None, **options: Any) -> Iterator[Pipeline]:
        """A pipeline for a case, whose arenas are freed at the end."""
        operators = captured_once(case, F32, ROWS, MICROBATCHES)
        plan = even_plan(operators, self.team.size, MICROBATCHES, **PLANS[self.plan])
        if self.to is not None:
            known = None if "compiler" in options else programs_of(case, F32, ROWS, MICROBATCHES, "cpu")
            plan = all_away(plan, operators, queues=self.queues, known=known)
            assert plan.memory.offload
        tier = OffloadTier(self.folder if self.to == "file" else "host")
        pipe = pipeline_on(
            self.team, case, ROWS, MICROBATCHES, OPTIMIZER, plan=evolve(plan, mesh=self.team.mesh), training=training,
            offload=tier, shard=self.shard, **options,
        )  # fmt: skip
        try:
            yield pipe
        finally:
            for each in pipe._trainer.offloads.values():
                each.close()

    def batch(self, case: Case, rows: int = ROWS) -> Any:
        """A batch of this process's replica; those of other replicas have fewer rows."""
        return case.batch(rows - self.team.replica, F32)


def bits(pipe: Pipeline) -> list[Any]:
    """Checksums of what this process holds: gradients, parameters and buffers."""
    with panpipe.weights.whole_parameters(pipe):
        held = [p for p in pipe._session.model.parameters() if not p.is_meta]
        tensors = [*(p.grad for p in held if p.grad is not None), *held]
        tensors += [b for b in pipe._session.model.buffers() if not b.is_meta]
        return [crc32(tensor.detach().contiguous().numpy().tobytes()) for tensor in tensors]


def steps(pipe: Pipeline, *batches: Any, update: bool = True) -> list[Any]:
    """Train on some batches: each loss, and the bits after an update. Gradients that wait may be on all replicas."""
    found = []
    for batch in batches:
        found += [pipe.step(batch, update=update).item().hex(), *(bits(pipe) if update else ())]
    return found


@FEATURES
def tied_weights_and_dropout(setting: Setting) -> list[Any]:
    with setting.pipeline(GPT) as pipe:
        return steps(pipe, *[setting.batch(GPT)] * 2)


@FEATURES
def batchnorm_and_evaluation_in_between(setting: Setting) -> list[Any]:
    found, batch = [], setting.batch(CONV)
    with setting.pipeline(CONV) as pipe:
        for _ in range(2):
            found += steps(pipe, batch)
            copies = [each.copies for each in pipe._trainer.offloads.values()]
            for training in (False, True):
                pipe._session.model.train(training)
                found.append(pipe.evaluate(batch).item().hex())
            assert [each.copies for each in pipe._trainer.offloads.values()] == copies
    return found


@FEATURES
def accumulation_and_clipping(setting: Setting) -> list[Any]:
    found, batch = [], setting.batch(GPT)
    with setting.pipeline(GPT, Training(clip_norm=0.05)) as pipe:
        for _ in range(2):
            found += [*steps(pipe, batch, update=False), *steps(pipe, batch), pipe.metrics.grad_norm.hex()]
    return found


@FEATURES
def scaled_losses_of_float16(setting: Setting) -> list[Any]:
    """With an update that is skipped, because a gradient of the last replica overflows."""
    found, last, rows = [], setting.team.replica == setting.team.replicas - 1, ROWS - setting.team.replica
    scaler = Scaler(init_scale=2.0**10, growth_interval=2)
    with setting.pipeline(TAPPED, Training(clip_norm=0.05, scaler=scaler)) as pipe:
        for overflow in (None, LAYERS - 1, None):
            found += steps(pipe, tapped_batch(rows, F32, overflow if last else None))
            found += [pipe.metrics.skipped, scaler.get_scale()]
        assert found.count(True) == 1
    return found


@FEATURES
def autocast_to_bfloat16(setting: Setting) -> list[Any]:
    case = LOWER["batchnorm with a skip"]
    with setting.pipeline(case) as pipe:
        return steps(pipe, *[setting.batch(case)] * 2)


@FEATURES
def uneven_and_fewer_microbatches(setting: Setting) -> list[Any]:
    with setting.pipeline(GPT) as pipe:
        return steps(pipe, *(setting.batch(GPT, rows) for rows in (11, 3, 12)))


@FEATURES
def changed_shapes(setting: Setting) -> list[Any]:
    """Shorter sequences, longer ones, which need a larger arena, and those of the example again."""
    with setting.pipeline(GPT) as pipe:
        return steps(pipe, *(tokens(ROWS - setting.team.replica, length) for length in (7, 16, 12)))


@FEATURES
def weighted_losses_and_metrics(setting: Setting) -> list[Any]:
    case = CASES["token-weighted"]
    with setting.pipeline(case) as pipe:
        found = steps(pipe, setting.batch(case))
        return [*found, *(value.hex() for value in pipe.metrics.values())]


@FEATURES
def compiled_stages(setting: Setting) -> list[Any]:
    compiler = StageCompiler(CompilerChoice("eager", lambda graph, _: graph.forward))
    with setting.pipeline(GPT, compiler=compiler) as pipe:
        return steps(pipe, *[setting.batch(GPT)] * 2)


@FEATURES
def checkpoint_and_resume(setting: Setting) -> list[Any]:
    batch = setting.batch(GPT)
    folder = setting.folder / f"checkpoint {setting.to} {setting.plan} {setting.shard}"
    with setting.pipeline(GPT) as pipe:
        steps(pipe, batch)
        pipe.checkpoint(folder)
    with setting.pipeline(GPT) as pipe:
        pipe.resume(folder)
        return steps(pipe, batch)


@FEATURES
def python_regions(setting: Setting) -> list[Any]:
    with setting.pipeline(PYTHON) as pipe:
        return [*steps(pipe, *[setting.batch(PYTHON)] * 2), *(value.hex() for value in pipe.metrics.values())]


def compared(team: Team, folder: Path, features: list[str], plans: list[str], shards: list[str]) -> dict[str, Any]:
    """Feature, plan and level of sharding → what is found without offload, on the host, and in a file with two queues
    of copies."""
    found = {}
    for name in features:
        for plan in plans:
            for shard in shards:
                setting = Setting(team, folder, plan=plan, shard=shard)
                others = (setting, evolve(setting, to="host"), evolve(setting, to="file", queues=2))
                found[f"{name}, {plan}, {shard}"] = [FEATURES[name](each) for each in others]
    return found


def check(found: dict[str, Any]) -> None:
    """Assert that what `compared` returns is the same three times."""
    for what, (stays, host, file) in found.items():
        assert len(stays) > 2
        assert stays == host, what
        assert stays == file, what
