"""Every pipeline of a test run offloads whatever may leave: ``PANPIPE_TEST_OFFLOAD=1 python -m pytest tests/runtimes``.

Results have the same bits as without offload, so that all tests of results pass; those of exact plans, memory and times
of a plan without offload do not. A prediction is that of the plan without offload, because its costs may be numbers of
a test; a device that reaches no host in it gets one of its own, to which copies take almost no time. With
``PANPIPE_TEST_OFFLOAD=late`` every copy is delayed at random, too.
"""

import os
import random
import time
from typing import Any

from attrs import evolve
from panpipe.core.cluster.cluster import Hub
from panpipe.core.cluster.routing import Link
from panpipe.core.errors import RequestError
from panpipe.core.plan.plan import Plan, Prediction
from panpipe.core.validation.validate import validate
from panpipe.runtimes import trainer
from panpipe.runtimes.batch.example import Example
from panpipe.runtimes.offload.copies import MemoryArena
from panpipe.runtimes.training.plan_setup import PlanSetup

from ..offloading import all_away

VARIABLE = "PANPIPE_TEST_OFFLOAD"
PLAIN = trainer.set_up_plan
"""What it replaces, also in a run of tests that all offload."""
LONGEST_S = 0.001
"""Longest random delay of a copy."""
FAST = 1e15
"""Bytes per second of copies in the prediction of a cluster without hosts."""


def force_offload() -> None:
    """Do as the environment variable says, in this process and its forks; without it nothing."""
    wanted = os.environ.get(VARIABLE, "")
    if not wanted:
        return

    def set_up_plan(example: Example, plan: Plan, **options: Any) -> PlanSetup:
        if not plan.memory.offload:
            programs = options["programs"]
            away = all_away(plan, example.operators, known=programs.known if programs.compiler is None else None)
            if away.memory.offload:
                validate(evolve(away, prediction=None))
                plan = evolve(away, prediction=plan.prediction and _with_hosts(plan.prediction))
        return PLAIN(example, plan, **options)

    trainer.set_up_plan = set_up_plan
    if wanted == "late":
        _delay_copies()


def _with_hosts(prediction: Prediction) -> Prediction:
    cluster, alone = prediction.cluster, []
    for number, device in enumerate(cluster.devices):
        try:
            cluster.host_path(number)
        except RequestError:
            alone.append(device.name)
    hubs = (*cluster.hubs, *(Hub(f"host of {name}", "host") for name in alone))
    links = (*cluster.links, *(Link(name, f"host of {name}", FAST, 0.0) for name in alone))
    return evolve(prediction, cluster=evolve(cluster, hubs=hubs, links=links))


def _delay_copies() -> None:
    drawn = random.Random(0)
    for name in ("write", "read"):
        plain = getattr(MemoryArena, name)

        def late(self: MemoryArena, *arguments: Any, plain: Any = plain) -> Any:
            time.sleep(drawn.random() * LONGEST_S)
            return plain(self, *arguments)

        setattr(MemoryArena, name, late)
