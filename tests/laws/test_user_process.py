"""What belongs to the user's process: its profiler, its random numbers, its settings, and what an import starts."""

import copy
import os
import random
import subprocess
import sys

import numpy
import panpipe
import pytest
import torch
from torch import nn


def step(model, batch):
    return model(batch).square().mean()


@pytest.fixture
def made():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    return model, torch.randn(8, 4)


def pipeline(model, batch):
    return panpipe.pipeline(
        model, step, batch, optimizer=torch.optim.SGD, microbatches=2, run=panpipe.Run(progress=False)
    )


def test_profile_function_of_the_user_stays_and_sees_all(made):
    names = []

    def profile(frame, event, argument):
        if event == "call":
            names.append(frame.f_code.co_name)

    def later():
        return 1

    sys.setprofile(profile)
    try:
        with pipeline(*made) as pipe:
            kept = [sys.getprofile() is profile]
            pipe.step(made[1])
            kept.append(sys.getprofile() is profile)
            later()
    finally:
        sys.setprofile(None)
    assert kept == [True, True]
    assert "later" in names


def test_random_numbers_and_settings_of_the_user_stay(made):
    def states():
        return (
            torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist(),
            torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads(), sys.gettrace(),
            torch.is_deterministic_algorithms_warn_only_enabled(), torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip

    before = states()
    with pipeline(*made) as pipe:
        assert states() == before
        pipe.step(made[1])
        pipe.evaluate(made[1])
    assert states() == before


def test_classes_of_torch_are_as_they_were(made):
    classes = (nn.Module, nn.Linear, torch.Tensor, torch.Generator, torch.optim.Optimizer, dict, list)
    before = [copy.copy(dict(vars(one))) for one in classes]
    functions = {name: vars(torch)[name] for name in vars(torch) if callable(vars(torch)[name])}
    with pipeline(*made) as pipe:
        pipe.step(made[1])
        assert [dict(vars(one)) for one in classes] == before
        assert {name for name in functions if vars(torch)[name] is not functions[name]} == set()


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="reads the open files of a process from /proc")
def test_import_opens_no_socket_and_starts_no_thread():
    code = (
        "import os, threading, panpipe\n"
        "links = [os.path.join('/proc/self/fd', name) for name in os.listdir('/proc/self/fd')]\n"
        "sockets = [os.readlink(link) for link in links if os.path.exists(link) and 'socket' in os.readlink(link)]\n"
        "print(threading.active_count(), len(sockets))\n"
    )
    rank = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    ended = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **rank}, capture_output=True, text=True, check=True
    )
    assert ended.stdout.split() == ["1", "0"]
