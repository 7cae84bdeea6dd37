from __future__ import annotations

import doctest
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbp_core import strategy_yaml
from sbp_core.errors import SbpLookupError, SbpValueError
from sbp_core.graph.ir import GraphInput, InputKind, LogicalGraph, Node, Ref, TensorType
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp, P, S
from sbp_core.serialize import read_yaml
from sbp_core.strategy import Assignment, Signature, Storage, Strategy
from sbp_core.strategy_yaml import from_yaml, load, save, to_yaml

SBPS = st.tuples(*[st.sampled_from([S(0), S(1), B, P, P("max")])] * 2).map(lambda e: NdSbp(*e))
STORED = st.tuples(*[st.sampled_from([S(0), S(1), B])] * 2).map(lambda e: NdSbp(*e))
NAMES = st.lists(
    st.sampled_from(["0", "1", "2", "12", "007", "h", "mm", "a b", "x:0", "{0-1}", "*", "="]),
    min_size=1,
    max_size=4,
).map(".".join)


@st.composite
def strategies(draw: st.DrawFn) -> Strategy:
    num_stages = draw(st.integers(1, 3))
    stages = tuple(
        Placement([[4 * i, 4 * i + 1], [4 * i + 2, 4 * i + 3]], ["data", "model"])
        for i in range(num_stages)
    )
    stage = st.integers(0, num_stages - 1)
    sides = st.lists(SBPS, max_size=2).map(tuple)
    signature = st.builds(Signature, sides, st.lists(SBPS, min_size=1, max_size=2).map(tuple))
    return Strategy(
        planner=draw(st.text(max_size=5)),
        graph_hash=draw(st.sampled_from(["0123", "12e3", "abcd"])),
        stages=stages,
        num_micro_batches=draw(st.integers(1, 4)),
        in_flight=(1,) * num_stages,
        nodes=draw(st.dictionaries(NAMES, st.builds(Assignment, stage=stage, signature=signature))),
        storage=draw(
            st.dictionaries(
                NAMES, st.builds(Storage, stage=stage, sbp=STORED, offloaded=st.booleans())
            )
        ),
        report={"why": ["because", 1.5, None], "time_s": 0.25},
    )


def layered(num_layers: int = 4) -> LogicalGraph:
    """A graph of equal layers, each a product with a weight."""
    kind = TensorType((4, 4), "float32")
    inputs = [GraphInput(name="x", kind=InputKind.BATCH)]
    nodes: list[Node] = []
    value = "x"
    for index in range(num_layers):
        weight, made = f"layers.{index}.w", f"layers.{index}.mm"
        inputs.append(GraphInput(name=weight, kind=InputKind.PARAMETER))
        nodes.append(
            Node(name=made, op="aten.mm.default", args=(Ref(value), Ref(weight)), outputs=(made,))
        )
        value = made
    types = {entry.name: kind for entry in inputs} | {node.name: kind for node in nodes}
    return LogicalGraph(name="t", inputs=tuple(inputs), outputs=(), nodes=tuple(nodes), types=types)


def strategy_of(graph: LogicalGraph) -> Strategy:
    mm = Signature((NdSbp(S(0)), NdSbp(B)), (NdSbp(S(0)),))
    return Strategy(
        planner="test",
        graph_hash="00",
        stages=(Placement([0, 1], ["data"]),),
        num_micro_batches=1,
        in_flight=(1,),
        nodes={node.name: Assignment(stage=0, signature=mm) for node in graph.nodes},
        storage={
            entry.name: Storage(stage=0, sbp=NdSbp(S(0) if entry.name == "x" else B))
            for entry in graph.inputs
        },
    )


@pytest.mark.slow
@given(strategies())
def test_a_strategy_comes_back_equal(strategy: Strategy) -> None:
    assert from_yaml(to_yaml(strategy)) == strategy


def test_a_file_comes_back_equal(tmp_path: Path) -> None:
    graph = layered()

    save(strategy_of(graph), tmp_path / "strategy.yaml")

    assert load(tmp_path / "strategy.yaml", graph) == strategy_of(graph)


def test_equal_layers_share_a_line_and_others_do_not() -> None:
    graph = layered(12)
    strategy = strategy_of(graph)
    storage = dict(strategy.storage) | {"layers.5.w": Storage(stage=0, sbp=NdSbp(S(1)))}

    text = to_yaml(Strategy.from_json(strategy.to_json() | {"storage": {
        name: str(entry) for name, entry in storage.items()
    }}))  # fmt: skip

    assert "  layers.{0-4,6-11}.w: (B)\n  layers.5.w: (S(1))\n" in text
    assert "  layers.{0-11}:\n    mm: (S(0)) (B) -> (S(0))\n" in text


def test_an_edit_of_a_shared_line_changes_all_its_layers() -> None:
    text = to_yaml(strategy_of(layered())).replace("{0-3}.w: (B)", "{0-3}.w: (S(1))")

    made = from_yaml(text, layered())

    assert {made.storage[f"layers.{index}.w"].sbp for index in range(4)} == {NdSbp(S(1))}


def test_patterns_decide_what_nothing_else_names() -> None:
    graph = layered()
    text = to_yaml(strategy_of(graph))
    text = text.replace("layers.{0-3}.w: (B)", "layers.2.w: (S(1))\n  '*.w': (B)")
    text = text.replace("  layers.{0-3}:\n    mm:", "  '*':\n    '*':")

    made = from_yaml(text, graph)

    assert made.nodes == strategy_of(graph).nodes
    assert [str(entry.sbp) for entry in made.storage.values()] == ["S(0)", "B", "B", "S(1)", "B"]


def test_a_pattern_without_a_graph_is_refused() -> None:
    text = to_yaml(strategy_of(layered())).replace("layers.{0-3}.w", "'*.w'")

    with pytest.raises(SbpValueError, match=r"the pattern '\*\.w' in storage needs the graph"):
        from_yaml(text)


def test_a_pattern_that_decides_nothing_is_refused() -> None:
    text = to_yaml(strategy_of(layered())).replace("  x: (S(0))", "  x: (S(0))\n  '*.v': (B)")

    with pytest.raises(SbpValueError, match=r"the pattern '\*\.v' decides nothing"):
        from_yaml(text, layered())


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        ("  x:", "  z:", "no state or batch tensor is called 'z'"),
        ("layers.{0-3}.w", "layers.{0-2}.v", r"called 'layers\.0\.v'(.*\n)*.*'layers\.0\.w'"),
        ("    mm:", "    nm:", r"no operator is called 'layers\.0\.nm'(.*\n)*.*'layers\.0\.mm'"),
    ],
)
def test_unknown_names_get_the_closest_match(before: str, after: str, what: str) -> None:
    text = to_yaml(strategy_of(layered()))
    assert before in text

    with pytest.raises(SbpLookupError, match=what):
        from_yaml(text.replace(before, after), layered())


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        ("(B)", "(Q)", "'Q' is no SBP value"),
        ("x: (S(0))", "x: S(0), B", "is outside of parentheses"),
        ("x: (S(0))", "x: (S(0)) (B)", "is no nd-SBP"),
        ("x: (S(0))", "x: (S(0)) @1", "x is on stage 1 of 1"),
        ("  x: (S(0))", "  x: (S(0))\n  layers.1.w: (B)", r"'layers\.1\.w' is decided twice"),
        ("planner: test", "planner: [", "this is no YAML"),
        ("planner:", "plannner:", "no place for 'plannner'(.*\n)*.*'planner'"),
        ("in_flight: [1]\n", "", "the strategy has no 'in_flight'"),
        ("num_micro_batches: 1", "num_micro_batches: many", "num_micro_batches is 'many'"),
        ("graph_hash: '00'", "graph_hash: 00", "graph_hash is 0(.*\n)*.*quotation marks"),
        ("graph_hash: '00'", "graph_hash: 2001-99-99", "this is no YAML"),
        ("graph_hash: '00'", "graph_hash: 2001-09-09", "graph_hash is a date"),
        ("graph_hash: '00'", "graph_hash: !!python/name:os.system x", "this is no YAML"),
        ("graph_hash: '00'", "graph_hash: &a x\nplanner: *a", "a reference"),
        ("num_micro_batches: 1", f"num_micro_batches: 1{':59' * 100_000}", "too long for a number"),
        ("in_flight: [1]", "in_flight: [1]\nin_flight: [2]", "'in_flight' occurs twice"),
        ("  x: (S(0))", "  5: (S(0))", "a name that is no text: 5"),
        ("  x: (S(0))", '  "\\ud800": (S(0))', "ud800' has half a character"),
        ("planner: test", 'planner: "\\udfff"', "udfff' has half a character"),
        ("- ranks: [0, 1]", "- rank: [0, 1]", r"stages\[0\] has no place for 'rank'"),
        ("- ranks: [0, 1]", "- ranks: ab", r"stages\[0\]: the ranks ab are no"),
        ("- ranks: [0, 1]", "- ranks: [0, true]", r"stages\[0\]: the ranks True are no"),
        ("in_flight: [1]", "in_flight: " + "[" * 5000, "this is no YAML"),
        ("layers.{0-3}.w", "layers.{0-999999999}.w", "more than 100,000 names"),
        ("layers.{0-3}.w", "layers." + "{0-1}" * 50 + ".w", "too many ranges"),
        ("in_flight: [1]", "in_flight: [0]", "does not fit 1 stages"),
    ],
)
def test_what_cannot_be_meant_is_refused(before: str, after: str, what: str) -> None:
    text = to_yaml(strategy_of(layered()))
    assert before in text

    with pytest.raises(SbpValueError, match=what):
        from_yaml(text.replace(before, after, 1))


@pytest.mark.parametrize("text", ["", "3", "[1]", "planner"])
def test_a_text_that_is_no_mapping_is_refused(text: str) -> None:
    with pytest.raises(SbpValueError, match="a strategy is a mapping"):
        from_yaml(text)


def test_without_pyyaml_an_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)

    with pytest.raises(SbpLookupError, match="PyYAML, which is not installed") as caught:
        to_yaml(strategy_of(layered()))

    assert "sbp-core[yaml]" in str(caught.value)


def test_a_number_and_a_text_are_two_keys() -> None:
    assert read_yaml("1: a\n'1': b\n", "x.yaml")[0] == {1: "a", "1": "b"}


def test_the_example_in_the_docstring_holds() -> None:
    failed, attempted = doctest.testmod(strategy_yaml)

    assert (failed, attempted) == (0, 8)
