"""Operator graphs: documents, everything that a file can have wrong, and layers."""

import json

import pytest
from panpipe.core.costs.graph import OpEdge, OpGraph, OpNode, graph_json, read_graph
from panpipe.core.costs.layers import layer_blocks
from panpipe.core.errors import RequestError

# Operator graphs: documents, and everything that a file can have wrong.


GRAPH = OpGraph(
    (OpNode("a", 1.0, 2.0, 3.0, parameter_bytes=4, state_bytes=16, parameters=("w",)), OpNode("b", saved_bytes=5)),
    (OpEdge("a", "b", 7, gradient=False, tensor=1),),
    name="two",
)


def written(tmp_path, text):
    path = tmp_path / "graph.json"
    path.write_text(text, encoding="utf-8")
    return path


def changed(tmp_path, change):
    data = json.loads(graph_json(GRAPH))
    change(data)
    return written(tmp_path, json.dumps(data))


def test_round_trip_gives_the_same_graph_and_bytes(tmp_path):
    path = written(tmp_path, graph_json(GRAPH))
    assert read_graph(path) == GRAPH
    assert graph_json(read_graph(path)) == path.read_text(encoding="utf-8")


def test_state_of_shared_parameters_is_counted_once(tmp_path):
    tied = OpGraph((*GRAPH.nodes, OpNode("head", parameter_bytes=4, parameters=("w",))))
    assert read_graph(written(tmp_path, graph_json(tied))) == tied


def test_file_may_omit_costs(tmp_path):
    text = '{"format": "panpipe.opgraph/1", "nodes": [{"name": "a"}], "edges": []}'
    assert read_graph(written(tmp_path, text)) == OpGraph((OpNode("a"),))


BAD = {
    "format": (lambda d: d.update(format="panpipe.opgraph/2"), "format 'panpipe.opgraph/2'.*version 1"),
    "other": (lambda d: d.update(format="panpipe.plan/1"), "not a panpipe.opgraph file"),
    "no format": (lambda d: d.pop("format"), "must state"),
    "unknown field": (lambda d: d.update(colour="red"), "colour"),
    "unknown node field": (lambda d: d["nodes"][0].update(speed=1), "speed"),
    "missing name": (lambda d: d["nodes"][0].pop("name"), "name"),
    "no nodes": (lambda d: d.update(nodes=[], edges=[]), "at least one"),
    "twice": (lambda d: d["nodes"][1].update(name="a"), "'a' appears twice"),
    "trained above all": (lambda d: d["nodes"][0].update(trained_bytes=5), "trained_bytes of 'a' is 5, above its"),
    "negative time": (lambda d: d["nodes"][0].update(forward_s=-1), "forward_s of 'a' is -1.*at least 0"),
    "endless time": (lambda d: d["nodes"][0].update(forward_s=1e999), "inf is not a finite number"),
    "negative size": (lambda d: d["nodes"][1].update(saved_bytes=-5), "saved_bytes of 'b' is -5"),
    "state without parameters": (lambda d: d["nodes"][0].update(state_bytes=3), "state_bytes of 'a' is 3, below"),
    "years": (
        lambda d: d["nodes"][0].update(backward_weight_s=4e7),
        "backward_weight_s of 'a' is 4e[+]07 s, more than",
    ),
    "years together": (
        lambda d: [node.update(forward_s=3e7) for node in d["nodes"]],
        "time of all operators together is 6e[+]07 s, more than",
    ),
    "unknown end": (lambda d: d["edges"][0].update(dst="z"), "names 'z', which is not a node"),
    "backwards": (lambda d: d["edges"][0].update(src="b", dst="a"), "b → a runs against the order"),
    "negative edge": (lambda d: d["edges"][0].update(bytes=-1), "a → b has -1 bytes"),
    "not a number": (lambda d: d["nodes"][0].update(forward_s="fast"), "forward_s"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
def test_a_wrong_file_is_refused_in_one_line(tmp_path, change, message):
    with pytest.raises(RequestError, match=message) as caught:
        read_graph(changed(tmp_path, change))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [(graph_json(GRAPH)[:-40], "not a whole JSON file"), ("[]", "holds a list"), ("", "is empty: give a JSON file")],
    ids=["truncated", "list", "empty"],
)
def test_file_that_is_no_document_is_refused(tmp_path, text, message):
    with pytest.raises(RequestError, match=message):
        read_graph(written(tmp_path, text))


def test_hash_depends_on_everything_but_times():
    same = OpGraph((OpNode("a", 9.0, parameter_bytes=4, parameters=("w",)), OpNode("b")), GRAPH.edges)
    other = OpGraph(GRAPH.nodes, (OpEdge("a", "b", 8, gradient=False, tensor=1),))
    assert same.hash == GRAPH.hash != other.hash


# The layers of a model, found in the names of its operators.


def blocks(text):
    """The blocks of operators in a text, with ``|`` between blocks."""
    return [" ".join(block) for block in layer_blocks(text.replace("|", " ").split())]


@pytest.mark.parametrize("text", [
    "emb/e | h.0.attn/mm h.0.mlp/mm | h.1.attn/mm h.1.mlp/mm | norm/n /loss",
    "0/linear | 1/gelu | 2/linear | 3/gelu | /loss",
    "0/linear | 1.0.a/mm 1.0.b/mm | 1.1.a/mm 1.1.b/mm | 2/linear",
    "0/embedding | 1.layers.0/mm | 1.layers.1/mm | 1.layers.2/mm | 2/head",
    "encoder.block.0.layer.0/a encoder.block.0.layer.1/b | encoder.block.1.layer.0/a encoder.block.1.layer.1/b",
    "stem/c | stage.0.conv/c stage.0.down/c stage.0.add/a | stage.1.conv/c stage.1.add/a | head/l",
    "layer3.attn layer3.mlp | layer4.attn layer4.mlp | head",
    "embed | layer_0 | layer_1 | head",
    "h.0/a /between h.0/b | h.1/a h.1/b",
])  # fmt: skip
def test_stages_may_end_between_the_outermost_modules_that_repeat(text):
    assert blocks(text) == [block.strip() for block in text.split("|")]
