import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbp_core.errors import SbpValueError
from sbp_core.placement import Placement
from sbp_core.sbp import NdSbp, all_entries
from sbp_core.strategy import Assignment, Signature, Storage, Strategy

MESH = Placement([[4, 5], [2, 3]], ("data", "tensor"), "cpu")


def strategy(**changes):
    sbp = NdSbp.parse
    values = {
        "planner": "test",
        "graph_hash": "abc",
        "stages": (MESH,),
        "num_micro_batches": 2,
        "nodes": {
            "mm": Assignment(
                stage=0, signature=Signature((sbp("S(0), B"), sbp("B, S(1)")), (sbp("S(0), S(1)"),))
            ),
            "arange": Assignment(stage=0, signature=Signature((), (sbp("B, B"),))),
            "max": Assignment(
                stage=0, signature=Signature((sbp("S(0), B"),), (sbp("P(max), B"), sbp("P, B")))
            ),
        },
        "storage": {
            "w": Storage(stage=0, sbp=sbp("B, S(1)")),
            "w.exp_avg": Storage(stage=0, sbp=sbp("B, S(1)"), offloaded=True),
        },
        "in_flight": (1,),
        "report": {"predicted_step_s": 0.1, "notes": ["a"]},
    }
    return Strategy(**{**values, **changes})


def test_json_round_trip_gives_an_equal_strategy():
    before = strategy()

    after = Strategy.from_json(json.loads(json.dumps(before.to_json())))

    assert after == before


def test_file_round_trip_gives_an_equal_strategy(tmp_path):
    before, path = strategy(), tmp_path / "strategy.json"

    before.save(path)

    assert Strategy.load(path) == before


@pytest.mark.parametrize("text", ["(S(0), B)@2", "(S(0), B) host", "(S(0), B)  host @2"])
def test_the_text_of_a_storage_says_where_it_lies(text):
    found = Storage.parse(text)

    assert found.offloaded == ("host" in text)
    assert found.stage == 2 * ("2" in text)
    assert Storage.parse(str(found)) == found


@pytest.mark.parametrize("text", ["(B) hosts", "host (B)", "(B) host host", "host"])
def test_other_words_of_a_storage_are_refused(text):
    with pytest.raises(SbpValueError):
        Storage.parse(text)


def test_a_saved_strategy_has_one_line_for_each_op(tmp_path):
    path = tmp_path / "strategy.json"

    strategy().save(path)

    lines = path.read_text(encoding="utf-8").splitlines()
    assert '    "mm": "(S(0), B) (B, S(1)) -> (S(0), S(1)) @0",' in lines


def test_a_strategy_without_nodes_can_be_saved(tmp_path):
    empty, path = strategy(nodes={}, storage={}, report={}), tmp_path / "strategy.json"

    empty.save(path)

    assert Strategy.load(path) == empty


def test_ranks_are_those_of_all_stages_in_order():
    stages = (Placement([6], ("data",)), Placement([1], ("data",)))

    assert strategy(stages=stages, in_flight=(2, 1)).ranks == (1, 6)


def test_another_format_is_refused():
    value = {**strategy().to_json(), "version": 99}

    with pytest.raises(SbpValueError, match="version is 99") as caught:
        Strategy.from_json(value)

    assert caught.value.accepted == '"version": 2'


def test_a_decision_on_a_stage_that_is_not_there_is_refused():
    value = strategy().to_json()
    value["storage"]["w"] = "(B, S(1)) @1"

    with pytest.raises(SbpValueError, match="w is on stage 1 of 1") as caught:
        Strategy.from_json(value)

    assert caught.value.accepted == "@0 to @0"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("(B", "without their ends"),
        ("B", "outside of parentheses"),
        ("(B) (B)", "no nd-SBP"),
        ("(S(99999999999))", "no SBP value"),
        ("(B) @one", "'one' is no stage"),
        ("(B) @" + "1" * 5000, "no stage"),
        (")" * 10000, "outside of parentheses"),
        ("(" * 10000, "without their ends"),
        (3, "storage.w is 3"),
        ("(B, P)", r"nothing is stored as P, and this is \(B, P\)"),
        (None, "storage.w is null"),
    ],
)
def test_a_decision_that_cannot_be_read_is_refused(text, says):
    value = strategy().to_json()
    value["storage"]["w"] = text

    with pytest.raises(SbpValueError, match=says):
        Strategy.from_json(value)


@pytest.mark.parametrize("in_flight", [(), (1, 1), (0,)])
def test_quotas_that_do_not_fit_the_stages_are_refused(in_flight):
    with pytest.raises(SbpValueError, match="in_flight"):
        strategy(in_flight=in_flight)


def test_no_micro_batches_are_refused():
    with pytest.raises(SbpValueError, match="num_micro_batches=0"):
        strategy(num_micro_batches=0)


def test_a_signature_prints_its_arguments_and_outputs():
    text = str(Signature((NdSbp.parse("S(0), B"), NdSbp.parse("B, B")), (NdSbp.parse("P, B"),)))

    assert text == "(S(0), B) (B, B) -> (P, B)"


entries = st.sampled_from(all_entries(3, ("sum", "max", "min")))
nd_sbps = st.tuples(entries, entries).map(lambda pair: NdSbp(*pair))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(nd_sbps, max_size=3), st.lists(nd_sbps, min_size=1, max_size=2))
def test_every_signature_survives_the_file_format(inputs, outputs):
    node = Assignment(stage=0, signature=Signature(tuple(inputs), tuple(outputs)))
    before = strategy(nodes={"op": node})

    assert Strategy.from_json(json.loads(json.dumps(before.to_json()))) == before


@pytest.mark.parametrize("text", ["(P)", "(B, P(max))", "(X)"])
def test_partial_values_are_not_among_what_is_accepted_as_storage(text):
    with pytest.raises(SbpValueError) as caught:
        Storage.parse(text)

    assert caught.value.accepted == "S(dim), B"
