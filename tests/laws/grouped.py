"""Arguments of ``panpipe.pipeline`` from one flat dict, for tests that pass options on."""

from typing import Any

import panpipe
from attrs import fields

GROUPS = {"memory": panpipe.Memory, "update": panpipe.Update, "run": panpipe.Run, "plan": panpipe.Auto}


def grouped(**given: Any) -> dict[str, Any]:
    """The arguments with those of each group in an object of it."""
    found, parts = dict(given), {name: {} for name in GROUPS}
    for name, group in GROUPS.items():
        for each in fields(group):
            if each.init and each.name in found:
                parts[name][each.name] = found.pop(each.name)
    if "plan" in found and parts["plan"]:
        assert found["plan"] in ("auto", None), f"a given plan with {parts['plan']}"
        del found["plan"]
    return found | {name: GROUPS[name](**part) for name, part in parts.items() if part}
