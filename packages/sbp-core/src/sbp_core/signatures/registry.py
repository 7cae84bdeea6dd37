"""Which rule belongs to which operator: PyTorch's own by family, then those of third parties.

Pointwise operators need no entry: they are recognised by the tag that the call carries. Imports no
torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import cache

from sbp_core.errors import SignatureError
from sbp_core.signatures.call import OpCall
from sbp_core.signatures.notation import Notation
from sbp_core.signatures.rule import Rule
from sbp_core.signatures.rules import RULES
from sbp_core.signatures.rules.opaque import OPAQUE
from sbp_core.signatures.rules.pointwise import POINTWISE

#: What a plugin may register for an operator: a rule, a notation, or a function that makes one.
RuleLike = Rule | str | Callable[[OpCall], Notation]


class Registry:
    """Rules by operator name.

    Args:
        extra: Rules of third parties; they take precedence over the built-in ones.
        fallback: Whether an operator without a rule may run whole on every rank (all B) instead of
            being an error.
    """

    def __init__(
        self, extra: Mapping[str, RuleLike] | None = None, *, fallback: bool = False
    ) -> None:
        self._rules: dict[str, Rule] = dict(RULES)
        for op, rule in (extra or {}).items():
            self._rules[op] = rule if isinstance(rule, Rule) else Rule(rule)
        self._fallback = fallback

    @property
    def ops(self) -> tuple[str, ...]:
        """The operators that have a rule of their own, sorted."""
        return tuple(sorted(self._rules))

    def rule(self, call: OpCall) -> Rule:
        """Return the rule of a call.

        Raises:
            SignatureError: there is none, the operator is not pointwise, and there is no fallback.
        """
        found = self._rules.get(call.op)
        if found is not None:
            return found
        if "pointwise" in call.tags:
            return POINTWISE
        if self._fallback:
            return OPAQUE
        near = get_close_matches(call.op, self._rules, n=3, cutoff=0.6)
        raise SignatureError(
            f"nothing says how {call.op} may be split: it has no rule and no tag 'pointwise'",
            where=call.where,
            accepted=f"operators with a rule, such as {', '.join(near)}" if near else "",
            todo=f"register a rule for {call.op!r} through the hook sbp_signatures, or allow the "
            "fallback that runs unknown operators whole on every rank",
        )


@cache
def builtin() -> Registry:
    """Return the registry without third parties."""
    return Registry()
