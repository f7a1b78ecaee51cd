"""Reading and writing JSON documents."""

import json

import pytest
from attrs import frozen
from panpipe.core.actions import Action, Kind
from panpipe.core.documents import as_plain, from_json, read_text, to_json
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


def test_document_is_read_and_written_again_to_the_same_bytes():
    text = to_json(FORMAT, EXAMPLE)
    read = from_json(text, FORMAT, Example, "x")
    assert read == EXAMPLE
    assert to_json(FORMAT, read) == text


def test_a_whole_number_may_be_written_as_other_programs_do():
    read = from_json(changed(sizes=[1e9, 3]), FORMAT, Example, "x")
    assert read.sizes == (10**9, 3)
    assert all(isinstance(size, int) for size in read.sizes)
    for size in (1.5, float("inf"), float("nan"), True, "1"):
        with pytest.raises(RequestError, match="is not a whole number"):
            from_json(changed(sizes=[size]), FORMAT, Example, "x")
    for size in (1e30, 2**53 + 1, -(2**63)):
        with pytest.raises(RequestError, match="is above 2"):
            from_json(changed(sizes=[size]), FORMAT, Example, "x")


@frozen
class Strict:
    name: str

    def __attrs_post_init__(self):
        raise RequestError(f"'{self.name}' is no name: take another")


def test_message_of_a_class_s_validation_is_kept():
    with pytest.raises(RequestError, match=r"x is not a valid panpipe.example/1: 'a' is no name: take another @"):
        from_json(json.dumps({"format": FORMAT, "name": "a"}), FORMAT, Strict, "x")


def test_object_becomes_plain_data_with_actions_as_text():
    assert as_plain(EXAMPLE) == {"name": "a", "sizes": [1, 2], "order": [["0F0", "0SEND_F0>1"]]}


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
        (changed(order=[["0F0x"]]), "'0F0x' is not an action"),
    ],
)
def test_wrong_documents_are_refused(text, message):
    with pytest.raises(RequestError) as caught:
        from_json(text, FORMAT, Example, "file.json")
    assert message in str(caught.value)
    assert str(caught.value).startswith("file.json ")
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(RequestError, match="No such file"):
        read_text(tmp_path / "absent.json")
    with pytest.raises(RequestError, match="Is a directory"):
        read_text(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RequestError, match="not UTF-8 text"):
        read_text(tmp_path / "binary")
