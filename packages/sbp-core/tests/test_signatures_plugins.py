"""Rules of plugins serve operators that have no rule otherwise."""

import pytest

from sbp_core.errors import SignatureError
from sbp_core.graph.ir import Ref, TensorType
from sbp_core.plugins import PluginSource, discover
from sbp_core.plugins import Registry as Plugins
from sbp_core.signatures import OpCall, Registry, derive


def call_of(op: str) -> OpCall:
    matrix = TensorType((4, 4), "float32")
    return OpCall(
        op=op,
        args=(Ref("x"), Ref("w")),
        inputs=(matrix, matrix),
        tensor_names=("x", "w"),
        outputs=(matrix,),
    )


def plugins() -> Plugins:
    return discover([PluginSource(name="mine", value="signature_plugin", distribution="mine")])


def test_an_operator_of_a_plugin_is_split_as_the_plugin_says() -> None:
    rules = Registry(plugins=plugins)

    found = derive(call_of("mine.matmul.default"), 2, rules=rules)

    assert {str(s) for s in found} == {
        str(s) for s in derive(call_of("aten.mm.default"), 2, rules=rules)
    }


def test_plugins_are_not_looked_for_while_the_built_in_rules_do() -> None:
    def fail() -> Plugins:
        raise AssertionError("nobody asked for plugins")

    assert derive(call_of("aten.mm.default"), 2, rules=Registry(plugins=fail))


def test_an_operator_that_nobody_knows_is_refused() -> None:
    with pytest.raises(SignatureError, match=r"mine\.other\.default"):
        derive(call_of("mine.other.default"), 2, rules=Registry(plugins=plugins))


def test_a_rule_of_the_wrong_kind_is_refused_with_its_distribution() -> None:
    with pytest.raises(SignatureError, match="is a int") as caught:
        derive(call_of("mine.broken.default"), 2, rules=Registry(plugins=plugins))

    assert "distribution mine" in caught.value.where
