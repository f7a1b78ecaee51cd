"""The team that a launch and a mesh ask for; no rank is started."""

from types import SimpleNamespace

import pytest
from panpipe.backends.gloo import KIND as GLOO
from panpipe.core.cluster.mesh import Mesh, MeshShape, parse_mesh
from panpipe.core.errors import RequestError
from panpipe.runtimes.launch.launch import make_team, mesh_for, mesh_in_simulator, rank_of_job, virtual_team, world_size
from panpipe.runtimes.launch.team import ThreadTeam


@pytest.fixture
def alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def plan_for(mesh):
    return SimpleNamespace(mesh=mesh)


def test_process_without_ranks_has_threads(alone):
    assert (world_size(), rank_of_job()) == (None, None)
    team = make_team(Mesh(3))
    assert isinstance(team, ThreadTeam)
    assert team.size == 3
    team.close()
    default = make_team()
    assert default.size == 2
    default.close()


def test_rank_and_size_are_those_of_torchrun(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert (world_size(), rank_of_job()) == (4, (1, 4))


def test_launch_that_does_not_fit_the_backend_is_refused(alone, monkeypatch):
    with pytest.raises(RequestError, match="backend 'gloo' needs ranks: start the script with torchrun"):
        make_team(Mesh(2), GLOO)
    with pytest.raises(RequestError, match=r"a mesh of 2 replicas in one process: .* --nproc-per-node 4"):
        make_team(Mesh(2, 2))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        RequestError, match="backend 'memcpy' connects threads of one process and this process is one of 2"
    ):
        make_team(Mesh(2), "memcpy")
    with pytest.raises(RequestError, match="the mesh pp=4,dp=1 is for 4 devices and the job has 2 ranks"):
        make_team(Mesh(4), "gloo")


@pytest.mark.parametrize("mesh", [None, Mesh(2, 2), MeshShape("pp=2", 2, None), parse_mesh("pp=2,dp=2")])
def test_mesh_of_a_plan_is_the_plans(mesh):
    assert mesh_for(plan_for(Mesh(2, 2)), mesh) == Mesh(2, 2)


def test_mesh_that_is_not_the_plans_is_refused():
    for mesh in (Mesh(4), MeshShape("pp=4", 4, None)):
        with pytest.raises(RequestError, match="the plan is for pp=2,dp=2: leave mesh out, or plan again"):
            mesh_for(plan_for(Mesh(2, 2)), mesh)
    assert mesh_for(None, Mesh(4)) == Mesh(4)


def test_simulated_devices_are_of_one_process_and_one_replica(alone, monkeypatch):
    assert mesh_in_simulator(None) == Mesh(2)
    with pytest.raises(RequestError, match="backend 'simulator' trains one replica and the mesh has 2"):
        mesh_in_simulator(Mesh(2, 2))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RequestError, match="this process is one of 2 ranks"):
        virtual_team(Mesh(2))
