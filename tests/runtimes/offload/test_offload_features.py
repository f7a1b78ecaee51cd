"""Offload together with other features of training: the same bits as without it, on the host and in a file."""

import pytest
from panpipe.runtimes.launch.team import ThreadTeam

from ...support.parity import PLANS
from ...support.programs.offload_features import FEATURES, check, compared

QUICK = (
    "scaled_losses_of_float16", "weighted_losses_and_metrics", "python_regions",
)  # fmt: skip
"""The others are in `test_offload` and `test_offload_ranks` with less of each."""
OFFLOADING = [name for name, options in PLANS.items() if options.get("recompute", ()) is not None]
pytestmark = pytest.mark.filterwarnings(
    "ignore:microbatches of a new shape", "ignore:storage '.*' of stage . is not as captured"
)


@pytest.mark.parametrize("feature", QUICK)
def test_features_have_the_same_bits_with_offload(tmp_path, feature):
    team = ThreadTeam(2)
    check(compared(team, tmp_path, [feature], ["gpipe"], ["none"]))
    team.close()


@pytest.mark.slow
@pytest.mark.parametrize("plan", OFFLOADING)
@pytest.mark.parametrize("feature", FEATURES)
def test_features_have_the_same_bits_with_offload_by_every_schedule(tmp_path, feature, plan):
    team = ThreadTeam(2)
    check(compared(team, tmp_path, [feature], [plan], ["none"]))
    team.close()
