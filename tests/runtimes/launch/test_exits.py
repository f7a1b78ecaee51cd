"""How processes end: closed or left open, and what a pipeline that is closed refuses."""

import importlib.metadata
import os
import subprocess
import sys

import panpipe
import pytest
import torch
from torch import nn

from ...support.cuts import captured, even_plan
from ...support.launch import alone
from ...support.models import Case
from ...support.plans import predicted

WATCHING = """
import os, time
import torch.distributed as dist
import panpipe.runtimes.watch.watch as watch
watch._POLL_S, watch._READERS = 0, 1e9  # the thread is inside a call of the store nearly all of the time
watch.FailureWatch(dist.TCPStore("127.0.0.1", 0, 1, True), 0, 1, 60.0)
time.sleep(0.05)
"""


def step(model, batch):
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def batch():
    return {"x": torch.ones(4, 8), "y": torch.zeros(4, 4)}


@pytest.fixture(scope="module")
def plan():
    case = Case(lambda dtype: model(), step, lambda rows, dtype: batch())
    return predicted(even_plan(captured(case, torch.float32, 4, 2), 2, 2, "gpipe"))


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def built(plan):
    return panpipe.pipeline(model(), step, batch(), optimizer=torch.optim.SGD, plan=plan)


def test_running_watch_does_not_abort_the_interpreter_at_exit():
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", WATCHING], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_closed_pipeline_refuses_every_operation(plan, tmp_path):
    pipe = built(plan)
    pipe.step(batch())
    pipe.close()
    pipe.close()
    for asked in (
        lambda: pipe.step(batch()),
        lambda: pipe.trace_step(batch()),
        lambda: pipe.evaluate(batch()),
        lambda: pipe.trace_step(batch(), evaluate=True),
        lambda: pipe.forward(batch(), lambda model, given: model(given["x"])),
        lambda: pipe.save(tmp_path),
        lambda: pipe.checkpoint(tmp_path / "1"),
        lambda: pipe.resume(tmp_path / "1"),
        pipe.__enter__,
    ):
        with pytest.raises(panpipe.RequestError, match=r"the pipeline is closed: .*build another"):
            asked()
    assert "closed" in repr(pipe)


def test_repr_of_pipeline_and_plan_is_short(plan):
    text = repr(plan)
    assert text.startswith("<Plan of Sequential: gpipe, 2 stages on 2 devices, 2 microbatches; predicted: ")
    assert text.endswith(" MiB on the fullest device>")
    pipe = built(plan)
    pipe.step(batch())
    first, second = repr(pipe).splitlines()
    assert first == "<Pipeline 1 step trained; stages here: 0, 1, on cpu"
    assert text in second
    pipe.close()


def test_package_has_a_version():
    assert panpipe.__version__ == importlib.metadata.version("panpipe")
    assert "__version__" in dir(panpipe)


def test_an_error_inside_the_context_of_one_rank_is_reported_to_the_others(tmp_path):
    left, stopped = alone("raising_in_context", tmp_path)
    assert stopped.returncode == 1
    assert "OSError: no such sample" in stopped.stderr
    assert left.returncode == 1
    [line] = left.stderr.splitlines()
    assert "rank 1 stopped: OSError: no such sample" in line


def test_pipeline_is_refused_in_a_fork(plan):
    pipe = built(plan)
    pipe.step(batch())
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            pipe.step(batch())
        except panpipe.RequestError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with open(read, encoding="utf-8") as said:
        assert f"this process is a fork of process {os.getpid()}, whose pipeline it is" in said.read()
    pipe.step(batch())
    pipe.close()
