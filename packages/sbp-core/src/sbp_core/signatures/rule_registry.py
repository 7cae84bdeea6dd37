"""`RuleRegistry`: finds the sharding rule of an operator by its name.

A plugin registers the rule of one operator under the operator's name, `mylib.myop.default`, or a
`RuleSet` for a namespace of operators, `mylib`; ATen's rules are registered in the same way. A
pointwise operator needs neither: it is recognised by the tag that the call carries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from enum import StrEnum
from functools import cache

from sbp_core.errors import SignatureError
from sbp_core.plugins import PluginRegistry, discover
from sbp_core.signatures.call import OpCall
from sbp_core.signatures.library import call_library
from sbp_core.signatures.no_rule import OPAQUE
from sbp_core.signatures.notation import Notation
from sbp_core.signatures.pointwise import POINTWISE
from sbp_core.signatures.rule import OperatorTraits, Rule, RuleSet
from sbp_core.signatures.sbp_ops import RULES, VIEWS
from sbp_core.signatures.signature import Signature1d


class UnknownOperator(StrEnum):
    """How an operator without a rule is treated: refused, all B, or discovered by execution."""

    REFUSE = "refuse"
    WHOLE = "whole"
    DISCOVER = "discover"

    @property
    def tag(self) -> str:
        """The tag of a graph node with this treatment, see `passes.allow_unknown`."""
        return f"unknown:{self.value}"


#: What a plugin may register for an operator: a rule, a notation, or a function that makes one.
RuleLike = Rule | str | Callable[[OpCall], Notation]


class RuleRegistry:
    """Rules by operator name.

    Args:
        extra: Rules that take precedence over all others.
        plugins: Returns the plugins whose rules and rule sets (hook `sbp_signatures`) serve
            operators without a rule of the core; called at most once. The installed plugins, if
            omitted.
        unknown: Treatment of an operator without a rule whose call has no tag for it.
    """

    def __init__(
        self,
        extra: Mapping[str, RuleLike] | None = None,
        *,
        unknown: UnknownOperator = UnknownOperator.REFUSE,
        plugins: Callable[[], PluginRegistry] | None = None,
    ) -> None:
        self._rules: dict[str, Rule] = dict(RULES)
        for op, rule in (extra or {}).items():
            self._rules[op] = _as_rule(rule)
        self._unknown = UnknownOperator(unknown)
        self._plugins = plugins or discover
        self._offered: PluginRegistry | None = None
        self._sets: dict[str, RuleSet] = {}

    @property
    def ops(self) -> tuple[str, ...]:
        """The operators with a separate rule, sorted; without single rules of plugins."""
        sets = [name for name in self._names() if "." not in name]
        return tuple(
            sorted({*self._rules, *(op for name in sets for op in self._rule_set(name).rules)})
        )

    def is_view(self, op: str) -> bool:
        """Whether results of an operator may be in the memory of its arguments.

        Args:
            op: Operator and overload, `aten.view.default`; the overload does not matter.
        """
        kind = (*op.split("."), "")[1]
        return op in VIEWS or kind in self.traits(op).views

    def traits(self, op: str) -> OperatorTraits:
        """Return the properties that passes may ask for, for the namespace of an operator."""
        return self._rule_set(op.partition(".")[0]).traits

    def rule(self, call: OpCall) -> Rule:
        """Return the rule of a call.

        Raises:
            SignatureError: there is no rule, the operator is not pointwise, and unknown operators
                are refused.
        """
        found = self._rules.get(call.op)
        if found is not None:
            return found
        namespace = self._rule_set(call.op.partition(".")[0])
        if call.op in namespace.rules:
            return namespace.rules[call.op]
        if "pointwise" in call.tags:
            return namespace.pointwise or POINTWISE
        if call.op in self._names():
            return self._of_plugin(call.op)
        if self._unknown_policy(call) is not UnknownOperator.REFUSE:
            return OPAQUE
        raise self._no_rule(call)

    def discovered(self, call: OpCall) -> tuple[Signature1d, ...]:
        """Return the signatures that execution finds for a call of an operator without a rule.

        Raises:
            SbpError: no tensor library is installed that could execute it.
        """
        if (
            self._unknown_policy(call) is not UnknownOperator.DISCOVER
            or self.rule(call) is not OPAQUE
        ):
            return ()
        return call_library().discover(call)

    def _unknown_policy(self, call: OpCall) -> UnknownOperator:
        """Return the treatment of a call if its operator has no rule."""
        return next((kind for kind in UnknownOperator if kind.tag in call.tags), self._unknown)

    def _names(self) -> tuple[str, ...]:
        """Return the operators and namespaces that plugins have rules for."""
        if self._offered is None:
            self._offered = self._plugins()
        return self._offered.names("signature")

    def _rule_set(self, namespace: str) -> RuleSet:
        """Return the rule set of a namespace; an empty one if there is none."""
        if namespace not in self._sets:
            made = (
                self._make_plugin_rule(namespace)
                if namespace in self._names()
                else RuleSet(rules={})
            )
            if not isinstance(made, RuleSet):
                raise self._wrong_type(namespace, made, "a RuleSet")
            self._sets[namespace] = made
        return self._sets[namespace]

    def _of_plugin(self, op: str) -> Rule:
        """Return the rule that a plugin registers for an operator, and keep it."""
        made = self._make_plugin_rule(op)
        if not isinstance(made, Rule | str) and not callable(made):
            raise self._wrong_type(
                op, made, "a Rule, a notation such as 'i k, k j -> i j', or call -> Notation"
            )
        self._rules[op] = _as_rule(made)
        return self._rules[op]

    def _make_plugin_rule(self, name: str) -> object:
        assert self._offered is not None, "its names were asked for"
        return self._offered.make("signature", name)

    def _wrong_type(self, name: str, made: object, accepted: str) -> SignatureError:
        assert self._offered is not None, "its names were asked for"
        return SignatureError(
            f"the plugin rule for {name} is a {type(made).__name__}",
            where=f"distribution {self._offered.entry('signature', name).distribution}",
            accepted=accepted,
        )

    def _no_rule(self, call: OpCall) -> SignatureError:
        """Return the error for a call of an operator without a rule."""
        # Only for sets that were requested; a broken set of another plugin does not matter here.
        known = [*self._rules, *(op for found in self._sets.values() for op in found.rules)]
        near = get_close_matches(call.op, known, n=3, cutoff=0.6)
        if not self._rule_set(call.op.partition(".")[0]).rules:
            # No plugin has the namespace: an ending such as `.default` makes no names similar.
            name = call.op.split(".")[-2:-1]
            near = [op for op in near if op.split(".")[-2:-1] == name]
        return SignatureError(
            f"nothing says how {call.op} may be split: it has no rule and no tag 'pointwise'",
            where=call.where,
            accepted=f"operators with a rule, such as {', '.join(near)}" if near else "",
            todo=f"register a rule for {call.op!r}, such as one line of notation, through the hook "
            "sbp_signatures of a plugin; or let it run whole on every rank with "
            "compile.unknown_ops=whole, or be tried out with compile.unknown_ops=discover "
            "(in Python: the pass allow_unknown, or "
            "rules=RuleRegistry(unknown=UnknownOperator.WHOLE))",
        )


def _as_rule(rule: RuleLike) -> Rule:
    return rule if isinstance(rule, Rule) else Rule(rule)


@cache
def installed_rules() -> RuleRegistry:
    """Return the default registry: the rules of the core and of all installed plugins."""
    return RuleRegistry()
