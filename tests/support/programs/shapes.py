"""Training on batches of many shapes, as a pipeline and in one process."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from panpipe.core.plan.plan import Plan
from panpipe.runtimes.diagnose.parity import reference_step
from panpipe.runtimes.launch.team import Team

from ..models import CASES, Case
from ..parity import OPTIMIZER
from ..ranks.teams import SEED, pipeline_on


def tokens(rows: int, length: int = 12) -> dict[str, torch.Tensor]:
    """Inputs and targets for a language model of `models`."""
    generator = torch.Generator().manual_seed(rows + 100 * length)
    return {name: torch.randint(0, 32, (rows, length), generator=generator) for name in ("x", "y")}


class Pair:
    """A pipeline, and one process to compare it with.

    Args:
        team: the devices.
        case: what is trained, in float64.
        rows: of the example.
        microbatches: of a step.
        plan: an even one by default.
        own_programs: whether its programs are its own; otherwise pipelines of the case share them.
        options: of the even plan.
    """

    def __init__(
        self,
        team: Team,
        case: Case | str,
        rows: int,
        microbatches: int,
        plan: Plan | None = None,
        own_programs: bool = False,
        **options: Any,
    ) -> None:
        self.case = case = CASES[case] if isinstance(case, str) else case
        self.microbatches = microbatches
        self.alone = case.model(torch.float64)
        self.optimizer = OPTIMIZER(self.alone.named_parameters())
        self.pipe = pipeline_on(
            team, case, rows, microbatches, OPTIMIZER, dtype=torch.float64, plan=plan, plan_options=options,
            **({"known": {}} if own_programs else {}),
        )  # fmt: skip

    def distance(self, batches: Sequence[Any]) -> float:
        """Train both on some batches; how far losses and this process's tensors are apart, at most."""
        found = [0.0]
        for batch in batches:
            index = self.pipe.metrics.steps
            loss = self.pipe.step(batch)
            wanted = reference_step(
                self.alone, self.case.step, batch, microbatches=self.microbatches, seed=SEED, index=index
            )
            self.optimizer.step()
            found.append(abs(loss.item() - wanted.item()))
        both = itertools.chain(self.alone.named_parameters(), self.alone.named_buffers())
        mine = dict(
            itertools.chain(self.pipe._session.model.named_parameters(), self.pipe._session.model.named_buffers())
        )
        found += [(mine[key] - wanted).abs().max().item() for key, wanted in both if not mine[key].is_meta]
        return float(torch.tensor(found).max())  # NaN if one is NaN, which Python's max would lose
