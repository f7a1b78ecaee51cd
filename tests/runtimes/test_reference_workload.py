"""The reference workload: one reading, the same everywhere."""

from panpipe.runtimes.launch.team import ThreadTeam
from panpipe.runtimes.profile.reference_workload import reference_s


def test_a_reading_is_some_time_of_all_devices():
    team = ThreadTeam(2)
    assert 1e-4 < reference_s(team, passes=1) < 60
    team.close()
