"""Ranks that train with captured graphs and without, and compare the bits; see `ranks`."""

from unittest import mock

import torch
from panpipe.runtimes.launch.team import Team
from panpipe.runtimes.programs.graphs import graph_pool

from ..backends.fake_graphs import FakeGraphPool
from ..models import Case
from ..parity import OPTIMIZER, PLANS, batches
from ..ranks.teams import pipeline_on

SHARED = ("none", "optimizer")


def over_ranks(team: Team, case: Case, plan: str) -> dict[str, list[bool]]:
    """By what replicas share: for each loss, parameter, gradient and buffer whether its bits are equal."""
    found = {}
    with mock.patch.dict(graph_pool._KINDS, {"cpu": FakeGraphPool}):
        for shard in SHARED:
            without, with_graphs = (_trained(team, case, plan, shard, graphs) for graphs in (False, True))
            found[shard] = list(map(torch.equal, without, with_graphs))
    return found


def _trained(team: Team, case: Case, plan: str, shard: str, graphs: bool) -> list[torch.Tensor]:
    model = case.model(torch.float32)
    pipe = pipeline_on(team, case, 4, 2, OPTIMIZER, model=model, shard=shard, plan_options=PLANS[plan], graphs=graphs)
    found = []
    for rows, update in (([4, 4], True), ([4, 3], True), ([4, 4], False), ([4, 4], True)):
        mine = batches(case, team.replicas, rows, torch.float32)[team.replica]
        found.append(pipe.step(mine, update=update).clone())
    here = [tensor for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta]
    found += here
    return [*found, *(tensor.grad for tensor in here if tensor.grad is not None)]
