"""Every pipeline of a test run offloads whatever may leave: ``PANPIPE_TEST_OFFLOAD=1 python -m pytest tests/runtimes``.

Results have the same bits as without offload, so that all tests of results pass; those of exact plans, memory and times
of a plan without offload do not. A prediction is that of the plan without offload: its cluster may have no host, and
its costs may be numbers of a test. With ``PANPIPE_TEST_OFFLOAD=late`` every copy is delayed at random, too.
"""

import os
import random
import time
from typing import Any

from attrs import evolve
from panpipe.core.plan.plan import Plan
from panpipe.core.plan.validation.validate import validate
from panpipe.runtimes.batch.example import Example
from panpipe.runtimes.offload.arena import MemoryArena
from panpipe.runtimes.training import trainer
from panpipe.runtimes.training.plan_setup import PlanSetup

from ..offloading import all_away

VARIABLE = "PANPIPE_TEST_OFFLOAD"
PLAIN = trainer.set_up_plan
"""What it replaces, also in a run of tests that all offload."""
LONGEST_S = 0.001
"""Longest random delay of a copy."""


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
                plan = evolve(away, prediction=plan.prediction)
        return PLAIN(example, plan, **options)

    trainer.set_up_plan = set_up_plan
    if wanted == "late":
        _delay_copies()


def _delay_copies() -> None:
    drawn = random.Random(0)
    for name in ("write", "read"):
        plain = getattr(MemoryArena, name)

        def late(self: MemoryArena, *arguments: Any, plain: Any = plain) -> Any:
            time.sleep(drawn.random() * LONGEST_S)
            return plain(self, *arguments)

        setattr(MemoryArena, name, late)
