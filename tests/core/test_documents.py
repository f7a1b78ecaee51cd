"""Reading and writing JSON documents."""

import json

import pytest
from attrs import frozen
from panpipe.core.actions import Action, Kind
from panpipe.core.documents import from_json, to_json
from panpipe.core.errors import RequestError

FORMAT = "panpipe.example/1"


@frozen
class Example:
    name: str
    sizes: tuple[int, ...]
    order: tuple[tuple[Action, ...], ...] = ()


EXAMPLE = Example("a", (1, 2), ((Action(0, Kind.F, 0), Action(0, Kind.SEND_F, 0, 1)),))


def test_format_comes_first_and_actions_are_text():
    assert json.loads(to_json(FORMAT, EXAMPLE)) == {
        "format": FORMAT,
        "name": "a",
        "sizes": [1, 2],
        "order": [["0F0", "0SEND_F0>1"]],
    }
    assert to_json(FORMAT, EXAMPLE).startswith('{\n "format": ')


def changed(**changes):
    data = {"format": FORMAT, "name": "a", "sizes": [1], **changes}
    return json.dumps({key: value for key, value in data.items() if value is not ...})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (to_json(FORMAT, EXAMPLE)[:-20], "file.json is not a whole JSON file (line "),
        ("[1]", "file.json holds a list, not the object that panpipe.example/1 needs"),
        (changed(format="panpipe.example/2"), "is of format 'panpipe.example/2'; this panpipe reads version 1"),
        (changed(format="panpipe.plan/1"), "file.json is not a panpipe.example file"),
        (changed(format=...), "and states None"),
        (changed(format=1), "and states 1"),
        (changed(sizes=...), "sizes"),
        (changed(sizes=["x"]), "sizes"),
        (changed(more=1), "more"),
        (changed(name="a" * 4097), "a text of more than 4096 characters"),
        (changed(name="a\n"), "characters that cannot be printed"),
        (changed(name="\ud800"), "characters that cannot be printed"),
        (changed(sizes=[10**400]), "is above 2^53"),
        (changed(order=[["0F0x"]]), "'0F0x' is not an action"),
    ],
)
def test_wrong_documents_are_refused(text, message):
    with pytest.raises(RequestError) as caught:
        from_json(text, FORMAT, Example, "file.json")
    assert message in str(caught.value)
    assert str(caught.value).startswith("file.json ")
    assert "\n" not in str(caught.value)
