"""A step on the whole batch, computed micro-batch by micro-batch.

The whole batch is the specification: the step is captured on it, so every size, count and constant
is that of the whole batch. The work of a micro-batch follows from the rules by which ranks compute
parts. The result of all parts is known once a step, from `sbp.accumulate`:

    whole      l = div(sum(e), n)                     g = mm(t(dy), x)      w1 = sub(w, g)
    micro      s = sum(e)                             p = mm(t(dy), x)
    step       S = accumulate(s, 1); l = div(S, n)    G = accumulate(p, 1); w1 = sub(w, G)

Read `layout` first: how parts make a whole, and how values of the whole batch relate to
micro-batches. `calls` writes calls of parts by signatures, `rearranged` calls without a fitting
signature, and `pieces` the turns of loops over samples. A number that is known once a step, such as
D, is a coefficient where it is combined with samples: `terms`. `targets` finds the numbers of
targets by which cross-entropies divide. `rewriting` uses all of these.

A result that is not linear in a value with coefficients is unknown, and so is one that depends on
the places of samples. If a result of the step is unknown, it is refused, with the line where the
unknown begins.
"""

from sbp_aten.passes.whole_batch.rewriting import whole_batch_loss

__all__ = ["whole_batch_loss"]
