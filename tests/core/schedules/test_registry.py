"""Schedules by name and from other packages."""

from importlib.metadata import EntryPoint

import pytest
from panpipe.core import plugins
from panpipe.core.errors import RequestError
from panpipe.core.schedules import registry
from panpipe.core.schedules.gpipe import gpipe
from panpipe.core.schedules.problem import ScheduleFamily

PLUGIN = ScheduleFamily("elsewhere", gpipe, "from another package")


@pytest.fixture
def plugged(monkeypatch):
    """Pretend that packages with these entry points are installed."""

    def install(*values):
        points = [EntryPoint(name, value, registry.GROUP) for name, value in values]
        monkeypatch.setattr(plugins, "entry_points", lambda group: points if group == registry.GROUP else [])
        registry.families.cache_clear()
        return registry.families

    yield install
    registry.families.cache_clear()


def test_an_unknown_name_lists_those_known():
    with pytest.raises(RequestError, match="no schedule 'zb': did you mean zb-"):
        registry.find_family("zb")


def test_broken_plugins_are_named_and_others_are_loaded(plugged, monkeypatch):
    monkeypatch.setattr(registry, "PLUGIN", PLUGIN, raising=False)
    load = plugged(
        ("absent", "no_such_module_here:FAMILY"),
        ("number", "panpipe.core.schedules.registry:GROUP"),
        ("taken", "panpipe.core.schedules.gpipe:FAMILY"),
        ("working", "panpipe.core.schedules.registry:PLUGIN"),
    )
    with pytest.warns(UserWarning, match="is left out") as caught:
        found = load()
    told = " ".join(str(warning.message) for warning in caught)
    assert "'absent'" in told
    assert "ModuleNotFoundError" in told
    assert "'number' (panpipe.core.schedules.registry:GROUP) is left out: it is a str" in told
    assert "'taken'" in told
    assert list(found) == [
        *(family.name for family in registry.BUILT_IN),
        "elsewhere",
    ]
