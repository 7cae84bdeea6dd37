import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbp_core.errors import SbpValueError
from sbp_planner.stages import parse_profile, read_profile

COSTS = "forward_compute_time=1.5, backward_compute_time=2.5, "


def node(name, text="ReLU(inplace)", activation="4.000", parameter="8.000", more=""):
    return (
        f"{name} -- {text} -- {COSTS}activation_size={activation}, parameter_size={parameter}{more}"
    )


SMALL = "\n".join(
    [
        node("node3", "Conv2d(3, 64, kernel_size=(3, 3), groups=[1, 2])"),
        node("node1", "Input0"),
        "\tnode3 -- node4",
        node("node2", "LSTM(8, 8)", activation="[6.0; 1.5; 0.5]", more=" -- stage_id=7"),
        node("node4", parameter="0.000"),
        "\tnode1 -- node2",
        "\tnode2 -- node3",
        "\tnode2 -- node4",
        node("node5", "__getitem__(1)"),
        "\tnode4 -- node5",
    ]
)


def test_nodes_and_edges_are_read_in_any_order():
    found = parse_profile(SMALL)

    graph = found.graph
    assert graph.names(0b111) == ("node2", "node3", "node4")
    block = graph.blocks[graph.index["node3"]]
    assert (block.forward_s, block.backward_s) == (0.0015, 0.0025)
    assert (block.activation_bytes, block.parameter_bytes) == (4, 8)
    assert found.descriptions["node3"] == "Conv2d(3, 64, kernel_size=(3, 3), groups=[1, 2])"


def test_several_results_of_an_operator_are_added_up():
    graph = parse_profile(SMALL).graph

    assert graph.blocks[graph.index["node2"]].activation_bytes == 8
    assert [flow.num_bytes for flow in graph.flows if flow.producer == "node2"] == [8]


def test_inputs_and_unused_items_are_left_out():
    found = parse_profile(SMALL)

    assert found.dropped == ("node1", "node5")
    assert set(found.graph.index) == {"node2", "node3", "node4"}


def test_an_input_that_depends_on_something_is_an_operator():
    found = parse_profile(f"{node('a')}\n{node('b', 'InputNorm')}\n\ta -- b")

    assert found.dropped == ()


def test_an_item_that_is_used_stays():
    found = parse_profile(f"{node('a', '__getitem__(0)')}\n{node('b')}\n\ta -- b")

    assert found.dropped == ()


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.permutations(SMALL.splitlines()))
def test_the_order_of_lines_does_not_matter(lines):
    wanted, found = parse_profile(SMALL).graph, parse_profile("\n".join(lines)).graph

    assert {block.name: block for block in found.blocks} == {b.name: b for b in wanted.blocks}
    uses = [
        {flow.producer: (set(flow.consumers), flow.num_bytes) for flow in graph.flows}
        for graph in (wanted, found)
    ]
    assert uses[0] == uses[1]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("node1 -- ReLU", "no node"),
        (f"node1 -- ReLU -- {COSTS}activation_size=1.0", "lacks parameter_size"),
        (node("node1", activation="many"), "activation_size=many"),
        (node("node1", activation="[1.0; x]"), "activation_size=[1.0; x]"),
        (node("node1", parameter="-1.0"), "parameter_size=-1.0"),
        (node("node1", parameter="nan"), "parameter_size=nan"),
        ("\tnode0", "no edge"),
        ("\tnode0 -- node0 -- node0", "no edge"),
        ("\tnode0 -- node9", "'node9'"),
        (node("node0"), "twice"),
    ],
)
def test_a_bad_line_is_named_with_what_would_be_accepted(line, said):
    with pytest.raises(SbpValueError) as caught:
        parse_profile(f"{node('node0')}\n{line}\n", where="graph.txt")

    assert said in caught.value.what
    assert caught.value.where == ("graph.txt:2",)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no operators"),
        (node("node1", "Input0"), "no operators"),
        (f"{node('a')}\n{node('b')}\n\ta -- b\n\tb -- a", "cycle"),
    ],
)
def test_a_file_that_cannot_be_cut_is_refused(text, said):
    with pytest.raises(SbpValueError, match=said) as caught:
        parse_profile(text, where="graph.txt")

    assert caught.value.where == ("graph.txt",)


def test_files_that_cannot_be_read_are_refused(tmp_path):
    binary = tmp_path / "graph.txt"
    binary.write_bytes(b"\xff\xfe\x00")

    for path in (tmp_path / "none.txt", tmp_path, binary):
        with pytest.raises(SbpValueError, match="cannot read") as caught:
            read_profile(path)
        assert caught.value.where == (str(path),)
