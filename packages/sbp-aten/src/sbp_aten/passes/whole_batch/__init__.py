"""A step on the whole batch, computed micro-batch by micro-batch.

The whole batch is the specification: the step is captured on it, so that every size, count and
constant is that of the whole batch. What a micro-batch computes follows from the rules by which
ranks compute parts; what the parts make together is known once a step, by `sbp.accumulate`:

    whole      l = div(sum(e), n)                     g = mm(t(dy), x)      w1 = sub(w, g)
    micro      s = sum(e)                             p = mm(t(dy), x)
    step       S = accumulate(s, 1); l = div(S, n)    G = accumulate(p, 1); w1 = sub(w, G)

Read `layout` first: how parts make a whole. `values` are what the values of the whole batch are to
micro-batches. `calls` writes calls of parts by signatures, `rearranged` those that no signature
says, and `pieces` the turns of loops over samples. A number that is known once a step, such as D,
meets samples as a coefficient: `terms`. `targets` are the numbers of targets that cross-entropies
divide by. `rewriting` puts it together.

What is not linear in a value with coefficients is unknown, and so is what depends on the places of
samples. A result that is unknown is refused, with the line where the unknown begins.
"""

from sbp_aten.passes.whole_batch.rewriting import whole_batch_loss

__all__ = ["whole_batch_loss"]
