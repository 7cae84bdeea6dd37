"""Rules of plugins serve operators that have no rule otherwise."""

import pytest

from sbp_core.errors import SignatureError
from sbp_core.graph.ir import Ref, TensorType
from sbp_core.plugins import PluginRegistry, PluginSource, discover
from sbp_core.signatures import OpCall, RuleRegistry, derive


def call_of(op: str) -> OpCall:
    matrix = TensorType((4, 4), "float32")
    return OpCall(
        op=op,
        args=(Ref("x"), Ref("w")),
        inputs=(matrix, matrix),
        tensor_names=("x", "w"),
        outputs=(matrix,),
    )


def plugins() -> PluginRegistry:
    names = ("signature_plugin", "small_rules")
    return discover([PluginSource(name=name, value=name, distribution="mine") for name in names])


def test_an_operator_of_a_plugin_is_split_as_the_plugin_says() -> None:
    rules = RuleRegistry(plugins=plugins)

    found = derive(call_of("mine.matmul.default"), 2, rules=rules)

    assert {str(s) for s in found} == {
        str(s) for s in derive(call_of("aten.mm.default"), 2, rules=rules)
    }


def test_plugins_are_looked_for_once() -> None:
    asked = []

    def count() -> PluginRegistry:
        asked.append(1)
        return plugins()

    rules = RuleRegistry(plugins=count)
    derive(call_of("aten.mm.default"), 2, rules=rules)
    derive(call_of("mine.matmul.default"), 2, rules=rules)

    assert len(asked) == 1


def test_rules_of_a_plugin_that_is_only_a_namespace_are_a_rule_set() -> None:
    with pytest.raises(SignatureError, match="rule for wrong is a str") as caught:
        derive(call_of("wrong.matmul.default"), 2, rules=RuleRegistry(plugins=plugins))

    assert "a RuleSet" in str(caught.value)


def test_views_are_those_of_the_rule_set() -> None:
    rules = RuleRegistry(plugins=plugins)

    assert rules.is_view("aten.view.default")
    assert rules.is_view("sbp.after")
    assert not rules.is_view("aten.mm.default")
    assert not rules.is_view("mine.view.default")


def test_an_operator_that_nobody_knows_is_refused() -> None:
    with pytest.raises(SignatureError, match=r"mine\.other\.default"):
        derive(call_of("mine.other.default"), 2, rules=RuleRegistry(plugins=plugins))


def test_a_rule_of_the_wrong_kind_is_refused_with_its_distribution() -> None:
    with pytest.raises(SignatureError, match="is a int") as caught:
        derive(call_of("mine.broken.default"), 2, rules=RuleRegistry(plugins=plugins))

    assert "distribution mine" in caught.value.where
