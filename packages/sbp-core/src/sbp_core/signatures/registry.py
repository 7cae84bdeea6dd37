"""Which rule belongs to which operator: PyTorch's own by family, then those of plugins.

Pointwise operators need no entry: they are recognised by the tag that the call carries. Plugins are
looked for only when an operator has no rule here. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from enum import StrEnum
from functools import cache
from importlib import import_module

from sbp_core.errors import SignatureError
from sbp_core.plugins import Registry as Plugins
from sbp_core.plugins import discover
from sbp_core.signatures.call import OpCall
from sbp_core.signatures.notation import Notation
from sbp_core.signatures.rule import Rule
from sbp_aten.rules import RULES
from sbp_core.signatures.opaque import OPAQUE
from sbp_aten.rules.pointwise import POINTWISE
from sbp_core.signatures.signature import Signature1d

_DISCOVERY = "sbp_torch.signatures.discover"


class Unknown(StrEnum):
    """What becomes of an operator without a rule: an error, all B, or what execution finds."""

    REFUSE = "refuse"
    WHOLE = "whole"
    DISCOVER = "discover"

    @property
    def tag(self) -> str:
        """The tag of a node of a graph that is to be treated so, see `passes.allow_unknown`."""
        return f"unknown:{self.value}"


#: What a plugin may register for an operator: a rule, a notation, or a function that makes one.
RuleLike = Rule | str | Callable[[OpCall], Notation]


class Registry:
    """Rules by operator name.

    Args:
        extra: Rules that take precedence over the built-in ones.
        plugins: Gives the installed plugins, whose rules (hook `sbp_signatures`) serve operators
            that have none otherwise; asked at most once.
        unknown: What becomes of an operator without a rule whose call has no tag that says so.
    """

    def __init__(
        self,
        extra: Mapping[str, RuleLike] | None = None,
        *,
        unknown: Unknown = Unknown.REFUSE,
        plugins: Callable[[], Plugins] | None = None,
    ) -> None:
        self._rules: dict[str, Rule] = dict(RULES)
        for op, rule in (extra or {}).items():
            self._rules[op] = _as_rule(rule)
        self._unknown = Unknown(unknown)
        self._plugins = plugins
        self._offered: Plugins | None = None

    @property
    def ops(self) -> tuple[str, ...]:
        """The operators that have a rule of their own, sorted."""
        return tuple(sorted(self._rules))

    def rule(self, call: OpCall) -> Rule:
        """Return the rule of a call.

        Raises:
            SignatureError: there is none, the operator is not pointwise, and unknown operators are
                refused.
        """
        found = self._rules.get(call.op)
        if found is not None:
            return found
        if "pointwise" in call.tags:
            return POINTWISE
        offered = self._from_plugins(call.op)
        if offered is not None:
            return offered
        if self._fate(call) is not Unknown.REFUSE:
            return OPAQUE
        near = get_close_matches(call.op, self._rules, n=3, cutoff=0.6)
        if not call.op.startswith("aten."):
            # Then endings such as `.default` are alike and mean nothing: go by the name alone.
            name = call.op.split(".")[-2:-1]
            near = [op for op in near if op.split(".")[-2:-1] == name]
        raise SignatureError(
            f"nothing says how {call.op} may be split: it has no rule and no tag 'pointwise'",
            where=call.where,
            accepted=f"operators with a rule, such as {', '.join(near)}" if near else "",
            todo=f"register a rule for {call.op!r}, such as one line of notation, through the hook "
            "sbp_signatures of a plugin; or let it run whole on every rank with "
            "compile.unknown_ops=whole, or be tried out with compile.unknown_ops=discover "
            "(in Python: the pass allow_unknown, or rules=Registry(unknown=Unknown.WHOLE))",
        )

    def _fate(self, call: OpCall) -> Unknown:
        """Return what becomes of a call if its operator has no rule."""
        return next((kind for kind in Unknown if kind.tag in call.tags), self._unknown)

    def discovered(self, call: OpCall) -> tuple[Signature1d, ...]:
        """Return what execution finds for a call whose operator nothing describes."""
        if self._fate(call) is not Unknown.DISCOVER or self.rule(call) is not OPAQUE:
            return ()
        # Knows torch, which those who only plan need not wait for.
        found: tuple[Signature1d, ...] = import_module(_DISCOVERY).discover_call(call).signatures
        return found

    def _from_plugins(self, op: str) -> Rule | None:
        """Return the rule that a plugin registers for an operator, and keep it."""
        if self._plugins is None:
            return None
        if self._offered is None:
            self._offered = self._plugins()
        if op not in self._offered.names("signature"):
            return None
        made = self._offered.make("signature", op)
        if not isinstance(made, Rule | str) and not callable(made):
            raise SignatureError(
                f"the plugin rule for {op} is a {type(made).__name__}",
                where=f"distribution {self._offered.entry('signature', op).distribution}",
                accepted="a Rule, a notation such as 'i k, k j -> i j', or call -> Notation",
            )
        self._rules[op] = _as_rule(made)
        return self._rules[op]


def _as_rule(rule: RuleLike) -> Rule:
    return rule if isinstance(rule, Rule) else Rule(rule)


@cache
def installed() -> Registry:
    """Return the registry that everything goes by unless told otherwise: ours, and plugins'."""
    return Registry(plugins=discover)
