"""What ranks of a test run: ``torchrun … tests/support/ranks/ranks.py JOB,… FOLDER [BACKEND]``.

What the jobs found, by their names: FOLDER/RANK.json.
"""

import importlib
import json
import os
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
import panpipe
import panpipe.runtimes.batch.shapes
from panpipe.core.cluster.mesh import parse_mesh
from panpipe.core.plan.plan import parse_plan, plan_json
from panpipe.core.policies.sharding import LEVELS
from panpipe.core.trace.perfetto import trace_json
from panpipe.core.trace.trace import COMPUTE_QUEUE
from panpipe.runtimes.devices.devices import device_of_rank
from panpipe.runtimes.diagnose.parity import reference_step
from panpipe.runtimes.launch.rank_team import RankTeam
from panpipe.runtimes.offload.tier import OffloadTier
from panpipe.runtimes.programs.graphs import graph_pool
from panpipe.runtimes.programs.stage_run import StageRun
from panpipe.runtimes.replan import moving
from panpipe.runtimes.training.agreement import check_same, compare_initial_weights, model_in_words
from panpipe.runtimes.update.buckets import Bucket
from panpipe.runtimes.update.training import Training
from panpipe.runtimes.update.trials import describe_update
from panpipe.runtimes.weights import weights_from
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.laws.grouped import grouped
from tests.support.backends.fake_graphs import FakeGraphPool
from tests.support.backends.fake_nccl import OVER_GLOO
from tests.support.backends.forced_offload import force_offload
from tests.support.cuts import captured_once, even_plan, irregular_plan
from tests.support.failures import FAILURES, described, throw
from tests.support.models import CASES, PYTHON, tokens
from tests.support.offloading import all_away
from tests.support.parity import OPTIMIZER, PLANS, SOME, Trained, batches, build, distance, largest
from tests.support.programs.offload_features import FEATURES, compared
from tests.support.programs.optimizing import on_mesh
from tests.support.programs.unused_parts import parts_over_ranks
from tests.support.ranks import demo, endless_waits, hangs, sharding, tensor_parallel
from tests.support.ranks.forks import serve
from tests.support.ranks.operator_ranks import POISONED, ROOT, monitored_steps, skipped_together
from tests.support.ranks.replanning import CHANGES, moved_and_not, moved_while_sharing
from tests.support.ranks.scaling_ranks import LOWER, TAPPED, in_bfloat16, refusal, scaled, step_apart
from tests.support.ranks.teams import pipeline_on, prepare

GPT = CASES["tied gpt with dropout"]


def captures(*wanted):
    """Marks a job that trains these cases, data types, rows and microbatches, by an even plan with the given options.

    Ranks that are forks have capture and stage programs from the process that they are forked from, which makes them
    once for all of them.
    """

    def mark(job):
        job.captured = wanted
        return job

    return mark


def capture(arguments, environment):
    """Capture what the jobs of a command line train, and derive its stage programs."""
    torch.set_num_threads(1)
    ranks, mesh = int(environment["WORLD_SIZE"]), environment.get("MESH")
    devices = parse_mesh(mesh).over(ranks).pipeline if mesh else ranks
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for job in () if arguments[0].endswith(".py") else arguments[0].split(","):
            for case, dtype, rows, microbatches, *plan in getattr(globals()[job], "captured", ()):
                prepare(case, dtype, rows, microbatches, devices, **(plan[0] if plan else {}))
            for module in getattr(globals()[job], "imported", ()):
                importlib.import_module(module)


FIRST, *OTHERS = CASES
OF_TWO = [(FIRST, "split backward"), (FIRST, "recompute in a v"), *zip(OTHERS, SOME, strict=True)]


@captures(*((CASES[name], torch.float64, 10, 4, PLANS[plan]) for name, plan in OF_TWO))
def parity(team):
    """The first case under two plans that differ most, and every other under one: the distances from one process."""
    return {f"{name}, {plan}": distance(team, name, torch.float64, 10, 4, **PLANS[plan]) for name, plan in OF_TWO}


@captures((GPT, torch.float32, 8, 4))
def ownership(team):
    """Which parameters have data here, and where the optimizer has state."""
    name = "tied gpt with dropout"
    pipe = build(team, name, torch.float32, 8, None, 4)
    pipe.step(CASES[name].batch(8, torch.float32))
    here = {name for name, p in pipe._session.model.named_parameters() if not p.is_meta}
    planned = {p for stage in pipe.plan.stages if stage.device in team.local for p in stage.parameters}
    states = [s.optimizer for s in pipe._trainer.stages.states.values()]
    return {
        "here": sorted(here),
        "planned": sorted(planned),
        "with state": sum(len(o.state) for o in states),
        "all": sorted(name for name, _ in pipe._session.model.named_parameters()),
    }


@captures((CASES["batchnorm with a skip"], torch.float32, 8, 4))
def traced(team):
    name = "batchnorm with a skip"
    pipe = build(team, name, torch.float32, 8, None, 4)
    _, trace = pipe.trace_step(CASES[name].batch(8, torch.float32))
    return {"events": [[e.device, e.queue, str(e.action), e.start_s, e.end_s] for e in trace.events]}


@captures((GPT, torch.float32, 8, 4))
def shifted(team):
    """A trace of ranks of which the second one's clock is 1,000 s ahead."""
    clock, ahead = time.perf_counter_ns, 1_000 * 10**9 * team.rank_here
    with mock.patch("time.perf_counter_ns", side_effect=lambda: clock() + ahead):
        pipe = build(team, "tied gpt with dropout", torch.float32, 8, None, 4)
        pipe.step(tokens(8))
        _, trace = pipe.trace_step(tokens(8))
    computed = [e for e in trace.events if e.queue == COMPUTE_QUEUE]
    return {"step_s": trace.step_s, "events": [[e.device, str(e.action), e.start_s, e.end_s] for e in computed]}


@captures((GPT, torch.float32, 8, 4))
def foreign_group(team):
    """Training with clipping and with replicas of gradients, where the job's group would use another transport."""
    allowed = []
    for name in ("send", "recv", "allreduce"):
        _refuse(name, allowed)
    team = RankTeam()
    agree = team.sum_over_processes

    def sum_over_processes(numbers):  # what ranks agree on is on the host under any transport
        allowed.append(True)
        handle = agree(numbers)
        allowed.pop()
        return handle

    team.sum_over_processes = sum_over_processes
    pipe = pipeline_on(team, GPT, 8, 4, OPTIMIZER, training=Training(clip_norm=0.5))
    return {"losses": [pipe.step(tokens(8)).item() for _ in range(2)], "norm": pipe.metrics.grad_norm}


@captures((GPT, torch.float64, 10, 4, PLANS["interleaved"]))
def over_nccl(team):
    """Training with the nccl backend, over gloo's groups in place of NCCL's, by a plan with tied weights."""
    import faulthandler

    faulthandler.dump_traceback_later(110, exit=True)
    team = RankTeam(OVER_GLOO)
    found = distance(team, "tied gpt with dropout", torch.float64, 10, 4, **PLANS["interleaved"])
    communicators = team.backend(team.local[0]).communicators
    return {"distance": found, "communicators": communicators, "shuffled": _shuffled_on_streams(team)}


def _shuffled_on_streams(team):
    """What is said by the calls after a step with samples in another order on one rank, where the host runs ahead."""
    pipe = build(team, "tied gpt with dropout", torch.float64, 10, None, 4, **PLANS["interleaved"])
    batch = tokens(10)
    mixed = {name: leaf.flip(0) if team.rank_here else leaf for name, leaf in batch.items()}
    folder = Path(sys.argv[2], "shuffled on streams")
    pipe.step(batch)  # batches of a new shape are compared before they run
    pipe.evaluate(batch)

    def after(call):
        pipe.step(mixed)
        return [refusal(call), refusal(lambda: pipe.step(batch))]

    # What is in the host's memory is compared before the update; here all of it counts as on a GPU.
    before = [refusal(lambda: pipe.step(mixed)), refusal(lambda: pipe.step(batch))]
    with mock.patch("panpipe.runtimes.batch.batch_agreement.is_on_gpu", return_value=True):
        return {"before": before, **_late(pipe, batch, mixed, folder, after)}


def _late(pipe, batch, mixed, folder, after):
    return {
        "step": after(lambda: pipe.step(batch)), "evaluate": after(lambda: pipe.evaluate(batch)),
        "save": after(lambda: pipe.save(folder)), "checkpoint": after(lambda: pipe.checkpoint(folder)),
        "state": after(pipe.state_dict), "evaluated": refusal(lambda: pipe.evaluate(mixed)),
        "close": after(pipe.close),
    }  # fmt: skip


@captures((GPT, torch.float64, 8, 4))
def scattered_over_nccl(team):
    """Replicas that share gradients with the nccl backend, whose sums over gloo end before the host goes on."""
    import faulthandler

    faulthandler.dump_traceback_later(110, exit=True)
    over_nccl = RankTeam(OVER_GLOO, mesh=parse_mesh(os.environ["MESH"]).over(4))
    return sharding.scheduled(over_nccl, ("zb-v", "early gradients"))


@captures((GPT, torch.float32, 4, 2, PLANS["split backward"]))
def graphs(team):
    """Captured graphs over replicas whose messages pass through the slots of nccl: which tensors have equal bits."""
    import faulthandler

    faulthandler.dump_traceback_later(110, exit=True)
    over_nccl = RankTeam(OVER_GLOO, mesh=parse_mesh(os.environ["MESH"]).over(4))

    def trained(shard, graphs):
        options = {"model": (model := GPT.model(torch.float32)), "shard": shard, "graphs": graphs}
        pipe = pipeline_on(over_nccl, GPT, 4, 2, OPTIMIZER, plan_options=PLANS["split backward"], **options)
        found = []
        for rows, update in (([4, 4], True), ([4, 3], True), ([4, 4], False), ([4, 4], True)):
            mine = batches(GPT, over_nccl.replicas, rows, torch.float32)[over_nccl.replica]
            found.append(pipe.step(mine, update=update).clone())
        here = [tensor for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta]
        return [*found, *here, *(tensor.grad for tensor in here if tensor.grad is not None)]

    with mock.patch.dict(graph_pool._KINDS, {"cpu": FakeGraphPool}):
        found = {
            shard: list(map(torch.equal, trained(shard, False), trained(shard, True)))
            for shard in ("none", "optimizer")
        }
    over_nccl.close()
    return found


def _refuse(name, allowed):
    """Let a method of process groups raise an error where ``allowed`` is empty."""
    function = getattr(torch.distributed.ProcessGroup, name)

    def call(*given, **named):
        if not allowed:
            raise AssertionError(f"{name} of the job's own group was called")
        return function(*given, **named)

    setattr(torch.distributed.ProcessGroup, name, call)


@captures((GPT, torch.float64, 8, 4))
def shapes(team):
    """Batches of few samples and of several lengths, of which programs for two shapes are kept; then rank 1 cannot
    compile for one, and both go on."""
    panpipe.runtimes.batch.shapes._KEPT = 2
    pair = Trained(team, "tied gpt with dropout", 8, 4)
    batches = [tokens(8), tokens(3), tokens(8, 7), tokens(8, 1), tokens(8)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = {"distance": pair.distance(batches), "said": [str(one.message) for one in said]}
    compile_stages = panpipe.runtimes.batch.shapes.compile_stages

    def fail(*given, **options):
        raise ValueError("not here")

    if team.local == (1,):
        panpipe.runtimes.batch.shapes.compile_stages = fail
    try:
        pair.pipe.step(tokens(3, 5))  # single rows have a capture of their own
    except Exception as failure:
        found["failure"] = f"{type(failure).__name__}: {failure}"
    panpipe.runtimes.batch.shapes.compile_stages = compile_stages
    found["afterwards"] = pair.distance([tokens(8)])
    rows = pair.pipe.forward(tokens(8), lambda model, batch: model(batch["x"]), everywhere=False)
    found["here"] = rows is not None
    pair.pipe._session.model.blocks.train(team.local == (1,))
    return {**found, "mode": refusal(lambda: pair.pipe.evaluate(tokens(8)))}


@captures((PYTHON, torch.float64, 6, 3))
def python(team):
    """A module and the end of a step that need values, over batches of several sizes, the last of two samples."""
    pair = Trained(team, PYTHON, 6, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [pair.distance([PYTHON.batch(rows, torch.float64)]) for rows in (6, 5, 2, 6)]
    regions = pair.pipe._trainer.prepared.shapes.latest.operators.step.regions
    return {"distance": found, "regions": sorted(regions), "metrics": dict(pair.pipe.metrics)}


@captures((GPT, torch.float32, 8, 4))
def dying(team):
    """The rank that the environment names is killed in its third step, or evaluation, where the environment says.

    ``STARVED`` names another one, which gets no CPU time for the next two and a half seconds.
    """
    victim, place, starved = int(os.environ["VICTIM"]), os.environ["WHERE"], os.environ.get("STARVED")
    Path(sys.argv[2], f"{team.rank_here}.pid").write_text(str(os.getpid()), encoding="utf-8")
    name = "tied gpt with dropout"
    pipe = build(team, name, torch.float32, 8, None, 4)

    def die():
        if pipe.metrics.steps < 2 or next(left, None) is not None:
            return
        if starved is not None:
            process = Path(sys.argv[2], f"{starved}.pid").read_text(encoding="utf-8")
            os.kill(int(process), signal.SIGSTOP)
            subprocess.Popen(["sh", "-c", f"sleep 2.5; kill -CONT {process}"])
        Path(sys.argv[2], "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    def dying_in(function):
        def call(*given, **named):
            done = function(*given, **named)
            die()
            return done

        return call

    if team.rank_here == victim:
        left = iter(range(1))  # after the second call of the step
        if place == "STEP":
            left = iter(())
            register_optimizer_step_pre_hook(lambda *_: die())
        elif place == "REDUCE":
            left = iter(())
            Bucket.reduce = dying_in(Bucket.reduce)
        else:
            methods = {"B": ("backward", "backward_input")}.get(place, ("forward",))
            for method in methods:
                setattr(StageRun, method, dying_in(getattr(StageRun, method)))
    for _ in range(1000):
        evaluating = place == "EVALUATE" and pipe.metrics.steps == 2
        (pipe.evaluate if evaluating else pipe.step)(CASES[name].batch(8, torch.float32))


def demo_with_a_wrong_gradient(team):
    """The demo, in which the last rank computes another gradient."""
    demo.run(Path(sys.argv[2]), "gradient")


demo_with_a_wrong_gradient.imported = ("transformers",)


def thinking(team):
    """Rank 1 is killed while rank 0 computes for long, as when it plans, and sends nothing."""

    def choose():
        time.sleep(600)

    if team.local == (1,):
        time.sleep(0.5)
        Path(sys.argv[2], "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    team.decide(choose)


@captures((GPT, torch.float32, 8, 4))
def leaving(team):
    """All ranks are through and go, half a second apart, the last in number without a word; rank 0 has the store."""
    name = "tied gpt with dropout"
    pipe = build(team, name, torch.float32, 8, None, 4)
    pipe.step(CASES[name].batch(8, torch.float32))
    time.sleep(0.5 * (team.size - 1 - team.local[0]))
    if team.local[0] == team.size - 1:
        sys.exit()


@captures((GPT, torch.float32, 8, 4))
def hanging(team):
    """One rank hangs as the environment says; see `hangs`."""
    hangs.patch_forwards()
    pipe = build(team, "tied gpt with dropout", torch.float32, 8, None, 4)
    hangs.run(pipe, GPT.batch(8, torch.float32), team.rank_here)


def gathering(team):
    """Rank 1 is killed while the others wait for it in a collective, which does not say whom it waits for."""

    def work(device):
        if device == 1:
            time.sleep(1.5)
            os.kill(os.getpid(), signal.SIGKILL)
        return device

    team.everywhere(work)


@captures(*((case, torch.float64, 4, 2) for case in (*CASES.values(), PYTHON)))
def replicas(team):
    """Every case over replicas, and with batches of other sizes; the first step as planned."""
    cases = {**CASES, "what stays python": PYTHON}
    return {"place": [team.replica, *team.local], "cases": sharding.every_case(team, "none", cases)}


@captures((GPT, torch.float64, 4, 2))
def lengths(team):
    """Batches of other lengths in each step, and on each replica."""
    trained = Trained(team, GPT, 4, 2)
    steps = [(12, 12), (9, 9), (7, 15), (12, 8), (16, 5)]
    distances = [trained.step_on([tokens(4, length) for length in each]) for each in steps]
    case = {"distances": distances, "bits": trained.bits(), "metrics": dict(trained.pipe.metrics)}
    return {"place": [team.replica, *team.local], "cases": {"lengths": case}}


def _shared(level, team):
    """Replicas that share at a level: cases and optimizers."""
    place = [team.replica, *team.local]
    cases = sharding.every_case(team, level, {**CASES, "what stays python": PYTHON})
    optimizers = sharding.every_optimizer(team, level)
    return {"place": place, "cases": cases, "optimizers": optimizers}


def _scaled(level, team):
    """Losses that are scaled, where replicas share at a level."""
    return {"place": [team.replica, *team.local], "cases": scaled(team, level)}


IN_FLOAT64 = captures(*((case, torch.float64, 4, 2) for case in CASES.values()))
sharded, scattered, parted = (IN_FLOAT64(partial(_shared, level)) for level in LEVELS[1:])
sharded_scaling, scattered_scaling, parted_scaling = (
    captures((TAPPED, torch.float32, 8, 4))(partial(_scaled, level)) for level in LEVELS[1:]
)


@captures((GPT, torch.float64, 8, 4))
def scattered_schedules(team):
    cleared = {level: sharding.cleared(team, level) for level in LEVELS[1:]}
    return {"schedules": sharding.scheduled(team, sharding.SOME), "cleared": cleared}


@captures(
    *((case, torch.float64, 4, 2) for case in (GPT, CASES["batchnorm with a skip"], sharding.FROZEN)),
    (GPT, torch.float64, 8, 4, PLANS["zb-v"]),
)
def sharded_states(team):
    """Checkpoints of replicas that share, plans with one sharded stage, and frozen parameters."""
    partly = {level: sharding.partly(team, level) for level in LEVELS[1:]}
    frozen, unfrozen = sharding.of_frozen_parameters(team), sharding.of_unfrozen_parameters(team, ["parameters"])
    evaluations = sharding.evaluations_by_stages(team)
    found = {"partly": partly, "frozen": frozen, "unfrozen": unfrozen, "evaluations": evaluations}
    return {**sharding.resumed(team, Path(sys.argv[2])), **found}


def nodes(team):
    """Where every rank is, the GPU that would be its own, and one case over replicas."""
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    with (
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("torch.cuda.device_count", return_value=2),
    ):
        gpu = str(device_of_rank(None, rank, team.mesh.ranks))
    trained = Trained(team, CASES["tied gpt with dropout"], 4, 2)
    return {
        "node": int(os.environ["GROUP_RANK"]),
        "local": local,
        "gpu": gpu,
        "pipeline": team.in_replica(lambda _: int(os.environ["GROUP_RANK"])),
        "place": [team.replica, *team.local],
        "distance": largest(trained.step([4] * team.replicas).values()),
    }


def whole(team):
    """From ``panpipe.pipeline`` with an automatic plan to a trace, a checkpoint and a pipeline made from it."""
    case, folder, rank = CASES["tied gpt with dropout"], Path(sys.argv[2]), int(os.environ["RANK"])
    batch = batches(case, 2, [4, 4], torch.float32)
    options = {"optimizer": torch.optim.AdamW, "microbatches": 2, "mesh": os.environ["MESH"]}
    pipe = panpipe.pipeline(case.model(torch.float32), case.step, batch[0], **grouped(max_chunks=1, **options))
    replica = pipe.plan.mesh.place(rank)[0]
    losses = [pipe.step(batch[replica]).item() for _ in range(2)]
    _, trace = pipe.trace_step(batch[replica])
    pipe.save(folder / "saved")
    text = plan_json(pipe.plan)
    if rank == 0:
        (folder / "plan.json").write_text(text, encoding="utf-8")
        (folder / "measured.json").write_text(trace_json(trace), encoding="utf-8")
    after = pipe.step(batch[replica]).item()
    pipe.close()
    plan = parse_plan(text, "the plan")
    names = ("dp", "pp") if plan.mesh.devices is None else ("pp", "dp")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    again = panpipe.pipeline(
        case.model(torch.float32),
        case.step,
        batch[0],
        **grouped(plan=plan, weights=folder / "saved", seed=0, first_step=3, **{**options, "mesh": mesh}),
    )
    loaded = again.step(batch[replica]).item()
    again.close()
    return {
        "losses": losses,
        "after": after,
        "loaded": loaded,
        "hash": plan.hash,
        "mesh": [list(r) for r in plan.mesh.replicas],
        "kinds": sorted({(e.device, str(e.action.kind)) for e in trace.events}),
    }


def adapter(team):
    """An adapter that the first rank takes a second to write; then one that it cannot write."""
    from panpipe.integrations.peft import save_adapter
    from peft import LoraConfig, PeftModel, get_peft_model

    folder, write = Path(sys.argv[2]), PeftModel.save_pretrained
    torch.manual_seed(0)
    base = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4), torch.nn.Tanh())
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["0", "2"]))
    batch, options = {"x": torch.randn(4, 4)}, {"schedule": "1f1b", "microbatches": 2}
    pipe = panpipe.pipeline(
        model,
        lambda model, batch: model(batch["x"]).square().mean(),
        batch,
        **grouped(optimizer=torch.optim.SGD, **options),
    )
    pipe.step(batch)

    def slowly(*given, **named):
        time.sleep(1.0)
        return write(*given, **named)

    def fail(*given, **named):
        raise OSError(28, "No space left on device")

    PeftModel.save_pretrained = slowly
    save_adapter(pipe, folder / "adapter")
    found = {"files": sorted(path.name for path in (folder / "adapter").iterdir())}
    PeftModel.save_pretrained = fail
    found["failure"] = refusal(lambda: save_adapter(pipe, folder / "full"))
    pipe.close()
    return found


def outlives_the_first(team):
    """A pipeline that goes on after the one that created the process group has been closed."""
    torch.manual_seed(0)
    model, batch = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(4)]), {"x": torch.randn(4, 4)}
    options = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1), "schedule": "1f1b", "microbatches": 2}
    pipe = panpipe.pipeline(model, lambda model, batch: model(batch["x"]).square().mean(), batch, **grouped(**options))
    losses = [float(pipe.step(batch))]
    team.close()
    remains = torch.distributed.is_initialized()
    time.sleep(0.5)  # the watch reads what the store has, again and again
    losses += [float(pipe.step(batch)) for _ in range(2)]
    start = time.monotonic()
    pipe.close()
    return {
        "losses": losses,
        "seconds": time.monotonic() - start,
        "remains": remains,
        "group": torch.distributed.is_initialized(),
    }


@captures((GPT, torch.float64, 8, 4))
def plugged(team):
    """A case over whatever backend the team has."""
    return {"backend": team.kind.name, **distance(team, "tied gpt with dropout", torch.float64, 8, 4)}


@captures((TAPPED, torch.float32, 8, 4))
def scaling(team):
    """Losses that are scaled, over any mesh; and scalers that are not the same to begin with."""
    other = torch.amp.GradScaler("cpu", init_scale=2.0 ** (10 + team.local[0] + team.replica))
    place = [team.replica, *team.local]
    return {
        "place": place,
        "cases": scaled(team),
        "refusal": refusal(lambda: check_same(team, Training(scaler=other).settings)),
    }


@captures(*((case, torch.float32, 8, 4) for case in LOWER.values()))
def lower(team):
    """Clipping and accumulation in bfloat16."""
    return {"place": [team.replica, *team.local], "cases": in_bfloat16(team)}


def apart(team):
    """Somebody changes the first rank's scaler in the middle of training."""
    step_apart(team)


def resumed(team):
    """Two steps from a checkpoint that another number of processes, under another plan, may have written."""
    folder, name = Path(sys.argv[2]), "batchnorm with a skip"
    case = CASES[name]
    pipe = on_mesh(team, case)
    whole = [case.batch(8 + index, torch.float32) for index in range(4)]
    batches = [{key: value[index:] for key, value in batch.items()} for index, batch in enumerate(whole)]
    stop = int(os.environ["STOP"])
    if (folder / "a").exists():
        pipe.resume(folder / "a")
    half = [{key: value.chunk(team.replicas)[team.replica] for key, value in batch.items()} for batch in batches]
    losses = [pipe.step(half[index]).item() for index in range(pipe.metrics.steps, stop)]
    if not (folder / "a").exists():
        pipe.checkpoint(folder / "a")
    mine = {name: p.tolist() for name, p in pipe._session.model.named_parameters() if not p.is_meta}
    return {"losses": losses, "rates": pipe.metrics.learning_rates, "parameters": mine, "steps": pipe.metrics.steps}


@captures((GPT, torch.float64, 8, 4))
def idle(team):
    """Training, evaluation, a trace and checkpoints where rank 0 has no stage, and the losses of one process."""
    name, folder = "tied gpt with dropout", Path(sys.argv[2], "idle")
    placement = [team.size - 1, *([1] * (team.size > 2)), team.size - 1]
    plan = irregular_plan(captured_once(GPT, torch.float64, 8, 4), placement, 4)
    pipe = build(team, name, torch.float64, 8, plan, 4)
    alone = GPT.model(torch.float64)
    optimizer = OPTIMIZER(alone.named_parameters())
    wanted, losses = [], []
    for index in range(2):
        wanted.append(reference_step(alone, GPT.step, tokens(8), microbatches=4, seed=3, index=index).item())
        optimizer.step()
        losses.append(pipe.step(tokens(8)).item())
    pipe.checkpoint(folder / "a", wait=False)
    later = pipe.step(tokens(8)).item()
    pipe._session.checkpoints.wait()
    pipe.resume(folder / "a")
    again = pipe.step(tokens(8)).item()
    _, trace = pipe.trace_step(tokens(8))
    pipe._session.model.eval()
    pipe.evaluate(tokens(8))
    rows = pipe.forward(tokens(8), _logits)
    return {
        "losses": losses, "alone": wanted, "again": [later, again], "rows": rows.shape[0],
        "devices": sorted({event.device for event in trace.events}),
        "here": sum(not parameter.is_meta for parameter in pipe._session.model.parameters()),
    }  # fmt: skip


@captures((GPT, torch.float64, 8, 4))
def saving(team):
    """Checkpoints that are written while ranks train, and ones that one rank alone cannot write or refuses."""
    folder, rank = Path(sys.argv[2], "saving"), team.rank_here
    pipe = build(team, "tied gpt with dropout", torch.float64, 8, None, 4)

    def loss():
        return pipe.step(tokens(8)).item().hex()

    loss()
    pipe.checkpoint(folder / "step-1", wait=False)
    second = loss()
    pipe.checkpoint(folder / "step-2", wait=False)
    third = loss()
    pipe._session.checkpoints.wait()
    pipe.resume(folder / "step-1")
    found = {"again": [loss(), loss()] == [second, third], "files": sorted(os.listdir(folder / "step-1"))}
    own = shutil.copytree(folder / "step-1", folder / f"own{rank}")
    others = sorted(own.glob("tensors*"))
    if rank == 1:
        data = bytearray(others[rank].read_bytes())
        data[-1] ^= 1
        others[rank].write_bytes(data)
    found["flipped on rank 1"] = refusal(lambda: pipe.resume(own))
    found["another on rank 1"] = refusal(lambda: pipe.resume(folder / f"step-{1 + rank}"))
    found["folder of rank 1"] = refusal(lambda: pipe.checkpoint(folder / f"other{rank}" / "a"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000 if rank == 1 else limits[0], limits[1]))
    found["written on rank 0 alone"] = refusal(lambda: pipe.checkpoint(folder / "step-3"))
    pipe.checkpoint(folder / "step-3", wait=False)
    found["later"] = refusal(lambda: [loss() for _ in range(10_000)])
    found["refused at"] = pipe.metrics.steps
    loss()  # raised once
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    pipe.checkpoint(folder / "step-3", keep=1)
    found["left"] = sorted(path.name for path in folder.iterdir() if not path.name.startswith("o"))
    return found


@captures((GPT, torch.float32, 8, 4))
def differing(team):
    """The errors of ranks with different arguments, and a step after all of them."""
    name, other = "tied gpt with dropout", team.local == (1,)
    case, operators = CASES[name], captured_once(CASES[name], torch.float32, 8, 4, "cpu")

    named = list(case.model(torch.float32).named_parameters())

    def freeze(model):
        next(model.parameters()).requires_grad_(not other)

    def model(change):
        change(found := case.model(torch.float32))
        return refusal(lambda: check_same(team, {"seed": 0, **model_in_words(found, operators)}))

    def step(batch):
        return refusal(lambda: build(team, name, torch.float32, 8, None, 4).step(batch))

    return {
        "equal": model(lambda model: None),
        "seed": refusal(lambda: check_same(team, {"seed": int(other)})),
        "absent": refusal(lambda: check_same(team, {"a": 1} if other else {"a": 1, "b": 2})),
        "lr": refusal(lambda: check_same(team, describe_update(partial(torch.optim.SGD, lr=1 + other), None, named))),
        "frozen": model(freeze),
        "mode": model(lambda model: model.blocks[0].train(not other)),
        "rows": step(tokens(6 if other else 8)),
        "values": step({**tokens(8), "y": (tokens(8)["y"] + other) % 32}),
        "afterwards": step(tokens(8)),
    }


@captures((GPT, torch.float64, 8, 4))
def shuffled(team):
    """What is said to ranks whose samples come in another order, and what becomes of the parameters; of two replicas
    the second one's second rank shuffles."""
    other = team.rank_here == team.mesh.ranks - 1
    pipe = build(team, "tied gpt with dropout", torch.float64, 8, None, 4)
    batch = tokens(8)
    mixed = {name: leaf.flip(0) if other else leaf for name, leaf in batch.items()}
    pipe.step(batch)
    pipe.evaluate(batch)
    pipe.forward(batch, _logits)
    before = [p.detach().clone() for stage in pipe._session.stage_parameters.values() for p in stage.values()]

    def unchanged():
        now = [p.detach() for stage in pipe._session.stage_parameters.values() for p in stage.values()]
        return all(map(torch.equal, before, now))

    found = {
        "step": refusal(lambda: pipe.step(mixed)),
        "steps": [pipe.metrics.steps, pipe.metrics.updates],
        "unchanged": unchanged(),
    }
    found["evaluate"] = refusal(lambda: pipe.evaluate(mixed))
    found["forward"] = refusal(lambda: pipe.forward(mixed, _logits))
    found["new shape"] = refusal(lambda: pipe.step({name: leaf[:6] for name, leaf in mixed.items()}))
    found["kept"] = refusal(lambda: pipe.step(mixed, update=False))
    found["still unchanged"] = unchanged()
    found["afterwards"] = refusal(lambda: pipe.step(batch))
    found["trained"] = not unchanged()
    return found


def _logits(model, batch):
    return model(batch["x"])


@captures((GPT, torch.float64, 8, 4))
def holding(team):
    """What is said of a parameter that the other rank holds; and that modes and files are as ever."""
    pipe = build(team, "tied gpt with dropout", torch.float64, 8, None, 4)
    averages = [torch.zeros(p.shape, dtype=p.dtype) for p in pipe._session.model.parameters()]
    pipe.step(tokens(8))
    elsewhere = {name: p for name, p in pipe._session.model.named_parameters() if p.is_meta}
    name = next(iter(elsewhere))

    def average():
        with torch.no_grad():
            for mine, p in zip(averages, pipe._session.model.parameters(), strict=True):
                mine.mul_(0.9).add_(p, alpha=0.1)

    found = {"average": refusal(average), "name": name}
    pipe._session.model.eval()
    pipe.evaluate(tokens(8))
    pipe.forward(tokens(8), _logits)
    pipe._session.model.train()
    pipe.save(Path(sys.argv[2], "saved"))
    pipe.checkpoint(Path(sys.argv[2], "checkpoint"))
    pipe.resume(Path(sys.argv[2], "checkpoint"))
    found["loss"] = pipe.step(tokens(8)).item()
    return {**found, "again": refusal(average), "text": repr(elsewhere[name])}


@captures((GPT, torch.float64, 8, 4))
def averaging(team):
    """An average of the weights on ranks, compared with a loop over what each holds; a checkpoint and an evaluation."""
    pipe = build(team, "tied gpt with dropout", torch.float64, 8, None, 4)
    ema = panpipe.weights.ema(pipe, 0.9)
    held = {name: p for name, p in pipe._session.model.named_parameters() if not p.is_meta}
    own = {name: p.detach().clone() for name, p in held.items()}
    for _ in range(3):
        pipe.step(tokens(8), update=False)
        pipe.step(tokens(8))
        for name, p in held.items():
            own[name].lerp_(p.detach(), 1 - 0.9)
    found = {"equal": all(torch.equal(own[name], ema.tensors[name]) for name in held), "names": sorted(ema.tensors)}
    pipe._session.model.eval()
    before = pipe.evaluate(tokens(8))
    with ema.applied():
        found["refused"] = refusal(lambda: pipe.step(tokens(8)))
        found["other loss"] = not torch.equal(before, pipe.evaluate(tokens(8)))
    found["same loss"] = torch.equal(before, pipe.evaluate(tokens(8)))
    pipe._session.model.train()
    pipe.checkpoint(Path(sys.argv[2], "with average"))
    pipe.step(tokens(8))
    pipe.resume(Path(sys.argv[2], "with average"))
    found["resumed"] = ema.updates == 3 and all(torch.equal(own[name], ema.tensors[name]) for name in held)
    noise = panpipe.weights.on_parameters(pipe, lambda name, p: p.add_(torch.randn_like(p)).sum().item())
    return {**found, "noise": noise}


@captures((GPT, torch.float64, 8, 4))
def beginning(team):
    """What is said to ranks whose models begin with other values, and a step from the checkpoint of `holding`."""
    case, other = CASES["tied gpt with dropout"], team.rank_here == 1

    def refused(change):
        change(model := case.model(torch.float64))
        return refusal(compare_initial_weights(team, model, weights_from(None, model, 0)).refuse_different)

    def one_bit(model):
        with torch.no_grad():
            model.position.weight.view(torch.int64)[-1, -1] ^= int(other)

    def drawn(model):
        torch.manual_seed(7 + other)
        for p in model.parameters():
            torch.nn.init.normal_(p)

    drawn(model := case.model(torch.float64))
    pipe = pipeline_on(team, case, 8, 4, OPTIMIZER, dtype=torch.float64, model=model)
    found = {
        "step": refusal(lambda: pipe.step(tokens(8))),
        "evaluate": refusal(lambda: pipe.evaluate(tokens(8))),
        "save": refusal(lambda: pipe.save(Path(sys.argv[2], "differing"))),
        "checkpoint": refusal(lambda: pipe.checkpoint(Path(sys.argv[2], "differing checkpoint"))),
    }
    pipe.resume(Path(sys.argv[2], "checkpoint"))
    return {
        **found,
        "loss": pipe.step(tokens(8)).item(),
        "equal": refused(lambda model: None),
        "bit": refused(one_bit),
        "seed": refused(drawn),
        "meta": refused(lambda model: model.to("meta") if other else model),
        "both meta": refused(lambda model: model.to("meta")),
    }


@captures((GPT, torch.float64, 8, 4))
def values(team):
    """What is said to ranks that change what the step reads into different values, and a step where all change it."""
    pipe = build(team, "tied gpt with dropout", torch.float64, 8, None, 4)
    pipe.step(tokens(8))
    found = {}
    for rate in (0.25 + 0.125 * team.rank_here, 0.5):
        for block in pipe._session.model.blocks:
            block.dropout = rate
        found[f"rate {len(found)}"] = refusal(lambda: pipe.step(tokens(8)))
    return {**found, "steps": pipe.metrics.steps}


@captures((GPT, torch.float64, 8, 4))
def apart_in_values(team):
    """Rank 1 alone changes what the step reads."""
    pipe = build(team, "tied gpt with dropout", torch.float64, 8, None, 4)
    pipe.step(tokens(8))
    for block in pipe._session.model.blocks:
        block.dropout = 0.1 + 0.25 * team.rank_here
    pipe.step(tokens(8))


@captures((GPT, torch.float32, 8, 4))
def apart_in_shapes(team):
    """Rank 1 gets a batch of a new shape; rank 0 gets another one, and steps."""
    pipe = build(team, "tied gpt with dropout", torch.float32, 8, None, 4)
    pipe.step(tokens(8))
    pipe.step(tokens(6 if team.local == (1,) else 8))


def failing(team):
    """What each rank sees of every failure: decided on rank 0, agreed on from rank 1."""
    found = {}
    for name, make in FAILURES.items():
        for way in ("decide", "agree"):
            try:
                if way == "decide":
                    team.decide(partial(throw, make))
                else:
                    team.agree(make() if team.local == (1,) else None)
            except Exception as failure:
                found[f"{way} {name}"] = described(failure)
    return {**found, "afterwards": team.decide(lambda: "all is well")}


def ending(team):
    """A failure on rank 0 ends every rank with its exit status, as the command line does."""
    try:
        team.decide(partial(throw, FAILURES[os.environ["FAILURE"]]))
    except panpipe.PanpipeError as failure:
        sys.exit(failure.exit_status)


@captures((GPT, torch.float32, 8, 4))
def raising(team):
    """Rank 1 alone raises an error: in a step, or in the user's code if the environment requests it."""
    name = "tied gpt with dropout"
    pipe = build(team, name, torch.float32, 8, None, 4)
    for step in range(1000):
        batch = CASES[name].batch(8, torch.float32)
        if step == 3 and team.local == (1,):
            if "OUTSIDE" in os.environ:
                raise FAILURES[os.environ["OUTSIDE"]]()
            batch["y"] = batch["y"] + 10_000
        pipe.step(batch)


@captures((GPT, torch.float32, 12, 4, PLANS["interleaved"]), (GPT, torch.float32, 12, 4, PLANS["recompute in a v"]))
def offloading(team):
    """The bits of plans without offload, with saved tensors on the host, and in a file."""
    plans = ["interleaved", "recompute in a v"]
    return compared(team, Path(sys.argv[2]), ["tied_weights_and_dropout"], plans, ["none"])


@captures((GPT, torch.float32, 12, 4, PLANS["gpipe"]))
def offloading_replicas(team):
    """Replicas whose saved tensors leave, with gradients that wait, clipping, and what shares most."""
    return compared(team, Path(sys.argv[2]), ["accumulation_and_clipping"], ["gpipe"], LEVELS[-2:])


def offloading_features(team):
    """Every feature with saved tensors that leave, by some plans, or with what replicas may share."""
    if team.replicas == 1:
        plans, levels = ["gpipe", "zb-v", "interleaved"], ["none"]
    else:
        plans, levels = ["gpipe"], LEVELS if team.size == 1 else ["gradients"]
    return compared(team, Path(sys.argv[2]), FEATURES, plans, levels)


@captures(*((CASES[name], torch.float32, 8, 4) for name in CHANGES))
def replanned(team):
    return {name: moved_and_not(team, name) for name in CHANGES}


@captures((GPT, torch.float64, 8, 4))
def replanned_parted(team):
    """Stages that move while replicas share parameters."""
    with mock.patch.object(moving, "PORTION_BYTES", 1000):  # several messages between two ranks
        return moved_while_sharing(team, GPT, "parameters")


@captures((sharding.FROZEN, torch.float64, 4, 2))
def unfrozen_sharing(team):
    """Parameters that are unfrozen while replicas share optimizers, or gradients."""
    return sharding.of_unfrozen_parameters(team, ["optimizer", "gradients"])


@captures((GPT, torch.float64, 8, 4), (sharding.FROZEN, torch.float64, 8, 4))
def replanned_sharing(team):
    """The same with the other levels, and with frozen parameters."""
    found = {level: moved_while_sharing(team, GPT, level) for level in ("optimizer", "gradients")}
    return {**found, "frozen": moved_while_sharing(team, sharding.FROZEN, "parameters")}


@captures((POISONED, torch.float32, 8, 4), (ROOT, torch.float32, 8, 4))
def not_finite(team):
    return skipped_together(team)


@captures((POISONED, torch.float32, 8, 4))
def monitored(team):
    return monitored_steps(team)


@captures((GPT, torch.float32, 12, 6))
def full_disk(team):
    """The file of rank 1 may not be written any more after the first step and its checkpoint."""
    operators, folder = captured_once(GPT, torch.float32, 12, 6, "cpu"), Path(sys.argv[2])
    plan = all_away(even_plan(operators, team.size, 6, "gpipe"), operators)
    pipe = build(team, "tied gpt with dropout", torch.float32, 12, plan, 6, offload=OffloadTier(folder))
    pipe.step(GPT.batch(12, torch.float32))
    pipe.checkpoint(folder / "checkpoint")
    if team.local == (1,):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
    pipe.step(GPT.batch(12, torch.float32))


TENSOR_RANKS = {
    "tensor_ranks": tensor_parallel.small,
    "used_tensor_ranks": tensor_parallel.used,
    "saved_tensor_ranks": tensor_parallel.saved,
    "layouts_of_tensor_ranks": tensor_parallel.with_layouts,
    "replicas_of_tensor_ranks": lambda: {
        mesh: tensor_parallel.with_replicas(mesh) for mesh in ("pp=2,dp=2,tp=2", "dp=2,pp=2,tp=2")
    },
    "sharing_replicas_of_tensor_ranks": partial(tensor_parallel.with_replicas, "dp=2,pp=2,tp=2", shared=True),
    "dropout_over_tensor_ranks": tensor_parallel.with_dropout,
    "guarded_tensor_ranks": tensor_parallel.guarded,
    "observed_tensor_ranks": tensor_parallel.observed,
    "more_tensor_ranks": tensor_parallel.large,
}
"""Jobs of models over tensor ranks, which make pipelines of their own."""
globals().update({name: lambda team, work=work: work() for name, work in TENSOR_RANKS.items()})
unused_parts = parts_over_ranks


def main() -> None:
    """Do jobs, or what another script does."""
    if sys.argv[1].endswith(".py"):
        sys.argv = sys.argv[1:]
        runpy.run_path(sys.argv[0], run_name="__main__")
        return
    from panpipe.runtimes.launch.launch import make_team

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    jobs, folder, *backend = sys.argv[1:]
    mesh = os.environ.get("MESH")
    named = {"endless-waits": endless_waits.KIND}
    team = make_team(parse_mesh(mesh) if mesh else None, *(named.get(name, name) for name in backend))
    found = {job: globals()[job](team) for job in jobs.split(",")}
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(found), encoding="utf-8")
    team.close()


if __name__ == "__main__":
    force_offload()
    work = serve(main, capture) if sys.argv[1:] == ["serve"] else main
    if work is not None:
        work()
