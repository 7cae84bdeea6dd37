import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbp_core.errors import ConfigError
from sbp_core.graph.ir import InputKind, Ref
from sbp_core.infer.pins import module_outputs, resolve_pins
from sbp_core.sbp import B, P, S
from sbp_core.testing.graphs import Builder, mlp

AXES = ("data", "tensor")


def storage(graph, *layers, axes=AXES):
    return {key: pin.entry for key, pin in resolve_pins(graph, axes, *layers).storage.items()}


def use(graph, *layers, axes=AXES):
    return {key: pin.entry for key, pin in resolve_pins(graph, axes, *layers).use.items()}


def test_one_entry_applies_to_every_axis():
    assert storage(mlp(), {"x": "S(0)"}) == {("x", 0): S(0), ("x", 1): S(0)}


def test_one_entry_an_axis_in_axis_order():
    assert storage(mlp(), {"x": "S(0), B"}) == {("x", 0): S(0), ("x", 1): B}


def test_a_mapping_leaves_other_axes_free():
    assert storage(mlp(), {"x": {"tensor": "S(1)"}}) == {("x", 1): S(1)}


def test_a_star_means_every_axis_not_named():
    assert storage(mlp(), {"x": {"*": "S(0)", "tensor": "B"}}) == {("x", 0): S(0), ("x", 1): B}


def test_later_pins_override_axis_by_axis():
    pins = {"x": "S(0)", "?": {"tensor": "B"}}

    assert storage(mlp(), pins) == {("x", 0): S(0), ("x", 1): B}


def test_a_later_layer_overrides_an_earlier_one():
    found = storage(mlp(), {"batch": "B"}, {"x": {"data": "S(0)"}})

    assert found == {("x", 0): S(0), ("x", 1): B}


def test_free_takes_earlier_pins_back():
    assert storage(mlp(), {"x": "S(0)", "batch": {"tensor": "free"}}) == {("x", 0): S(0)}


def test_words_mean_all_inputs_of_a_kind():
    found = storage(mlp(), {"optimizer_states": "B"}, axes=("data",))

    assert {name for name, _ in found} == {
        f"layers.{i}.weight.{key}" for i in (0, 1) for key in ("exp_avg", "exp_avg_sq")
    }


def test_a_pattern_of_inputs_is_not_also_a_pattern_of_values():
    pins = resolve_pins(mlp(), ("data",), {"layers.0.*": "B"})

    assert not pins.use
    assert ("layers.0.weight", 0) in pins.storage


def test_a_module_means_the_values_that_leave_it():
    assert use(mlp(), {"layers.0": "B"}, axes=("data",)) == {("layers.0.relu", 0): B}


def test_module_outputs_count_uses_in_the_backward_pass_of_other_modules():
    assert module_outputs(mlp(), "layers.1") == ["layers.1.relu"]


def test_a_value_may_be_used_as_partial():
    assert use(mlp(), {"layers.0.mm": "P"}, axes=("data",)) == {("layers.0.mm", 0): P}


def test_use_pins_how_an_input_is_used_not_how_it_is_stored():
    pins = resolve_pins(mlp(), ("data",), {"use:layers.0.weight": "S(1)"})

    assert not pins.storage
    assert pins.use["layers.0.weight", 0].entry == S(1)


def test_a_dim_may_be_counted_from_the_last():
    assert storage(mlp(), {"x": "S(-2)"}, axes=("data",)) == {("x", 0): S(0)}


def test_activations_are_floating_values_with_a_sample_in_dim_0():
    found = {name for name, _ in use(mlp(), {"activations": "S(0)"}, axes=("data",))}

    assert found == {"layers.0.mm", "layers.0.relu", "layers.1.mm", "layers.1.relu"}


def test_gradients_are_what_the_optimizer_gets():
    found = {name for name, _ in use(mlp(), {"gradients": "B"}, axes=("data",))}

    assert found == {"layers.0.grad.mm", "layers.1.grad.mm"}


def test_updates_are_what_the_optimizer_makes():
    found = {name for name, _ in use(mlp((4, 4)), {"updates": "B"}, axes=("data",))}

    assert found == {
        f"layers.0.weight.update.{op}" for op in ("lerp", "addcmul", "sqrt", "addcdiv")
    }


def test_words_give_way_where_a_tensor_has_no_such_dim():
    b = Builder()
    b.add_input("scale", InputKind.PARAMETER, ())
    b.add_input("w", InputKind.PARAMETER, (4,))
    b.op("mul", "mul.Tensor", (Ref("scale"), Ref("w")), (4,), pointwise=True)

    assert storage(b.graph(), {"parameters": "S(0)"}, axes=("data",)) == {("w", 0): S(0)}


def test_a_pin_that_matches_nothing_names_the_nearest_names():
    with pytest.raises(ConfigError, match=r"'layers.0.wieght: B' matches no tensor") as caught:
        resolve_pins(mlp(), AXES, {"layers.0.wieght": "B"})

    assert "layers.0.weight" in caught.value.todo


def test_a_pattern_of_all_layers_that_matches_nothing_is_answered_with_such_a_pattern():
    with pytest.raises(ConfigError, match="matches no tensor") as caught:
        resolve_pins(mlp(), AXES, {"layers.*.wieght": "B"})

    assert "layers.*.weight" in caught.value.todo
    assert "layers.0.weight" not in caught.value.todo


def test_an_unknown_axis_is_named():
    with pytest.raises(ConfigError, match="'tensr'") as caught:
        resolve_pins(mlp(), AXES, {"x": {"tensr": "B"}})

    assert "data, tensor" in caught.value.accepted


def test_a_dim_that_the_tensor_does_not_have_is_refused():
    with pytest.raises(ConfigError, match=r"cannot hold for 'x' of shape \(8, 4\)") as caught:
        resolve_pins(mlp(), AXES, {"x": "S(2)"})

    assert caught.value.accepted == "B, S(0), S(1)"


@pytest.mark.parametrize("pattern", ["x", "batch"])
def test_nothing_is_stored_as_partial(pattern):
    with pytest.raises(ConfigError, match="cannot hold"):
        resolve_pins(mlp(), AXES, {pattern: "P"})


def test_a_wrong_number_of_entries_is_refused():
    with pytest.raises(ConfigError, match="3 entries for a mesh of 2 axes"):
        resolve_pins(mlp(), AXES, {"x": "B, B, B"})


def test_text_that_is_no_sbp_is_refused_with_the_pin():
    with pytest.raises(ConfigError, match=r"the pin 'x: \{data: T\(0\)\}' cannot be read"):
        resolve_pins(mlp(), AXES, {"x": {"data": "T(0)"}})


@pytest.mark.parametrize(
    ("word", "dims", "accepted"),
    [
        ("batch", "2", "B, S(0), S(1)"),
        ("use:batch", "2", "B, S(0), S(1)"),
        ("gradients", "2", "B, S(0), S(1)"),
        ("activations", "2", "B, S(0), S(1)"),
    ],
)
@pytest.mark.parametrize("entry", ["S(9)", "S(2)", "S(-3)"])
def test_a_word_that_no_tensor_can_hold_is_refused_with_the_dims_that_they_have(
    word, dims, accepted, entry
):
    with pytest.raises(ConfigError, match=f"holds for no tensor .* they have {dims} dims") as no:
        resolve_pins(mlp(), AXES, {word: {"data": entry}})

    assert no.value.accepted == accepted


@given(st.lists(st.integers(0, 3), max_size=4), st.integers(-4, 4))
def test_a_word_holds_wherever_it_can_and_is_refused_where_none_with_dims_can(ranks, dim):
    b = Builder()
    for index, rank in enumerate(ranks):
        b.add_input(f"w{index}", InputKind.PARAMETER, (4,) * rank)
    b.add_input("x", InputKind.BATCH, (4,))
    b.op("relu", "relu.default", (Ref("x"),), (4,), pointwise=True)
    graph = b.graph()
    holding = [i for i, rank in enumerate(ranks) if -rank <= dim < rank]

    if any(ranks) and not holding:
        with pytest.raises(ConfigError, match="holds for no tensor"):
            resolve_pins(graph, ("data",), {"parameters": f"S({dim})"})
    else:
        found = storage(graph, {"parameters": f"S({dim})"}, axes=("data",))
        assert found == {(f"w{i}", 0): S(dim % ranks[i]) for i in holding}


def test_a_word_that_means_no_tensor_says_nothing():
    assert not storage(mlp(), {"micro_gradients": "S(9)"})


@pytest.mark.parametrize("value", [3, None, ["S(0)"], {"data": 3}, {"data": None}, {}])
def test_what_is_no_text_is_refused(value):
    with pytest.raises(ConfigError, match="pin") as refused:
        resolve_pins(mlp(), AXES, {"x": value})

    assert "S(0)" in refused.value.accepted or "S(dim)" in refused.value.accepted


def test_a_mistyped_axis_is_answered_with_the_nearest():
    with pytest.raises(ConfigError) as refused:
        resolve_pins(mlp(), AXES, {"x": {"tensr": "B"}})

    assert refused.value.todo == "did you mean 'tensor'?"


def test_nothing_is_split_over_the_stages_of_a_pipeline():
    with pytest.raises(ConfigError, match="pipeline stages") as refused:
        resolve_pins(mlp(), AXES, {"x": {"pipe": "S(0)"}})

    assert "stage_patterns" in refused.value.todo
