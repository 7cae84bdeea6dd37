"""Rewrite a step captured on the whole batch into micro-batches with accumulation; same results.

The whole batch is the specification: every size, count and constant of the captured step belongs to
the whole batch. A micro-batch is treated like a rank of one more mesh axis: its computation follows
from the sharding rules (signatures). Totals over all micro-batches are computed once a step, by
`sbp.accumulate`:

    whole      l = div(sum(e), n)                     g = mm(t(dy), x)      w1 = sub(w, g)
    micro      s = sum(e)                             p = mm(t(dy), x)
    step       S = accumulate(s, 1); l = div(S, n)    G = accumulate(p, 1); w1 = sub(w, G)

Read `layout` first: how parts form a whole. `calls` writes calls on parts by signatures,
`rearranged` calls that no signature covers, and `pieces` the iterations of loops over samples.
`terms` handles numbers that are known only once a step, such as a divisor, as coefficients of
samples. `targets` finds the numbers of targets that cross-entropies divide by. `rewriting` combines
all of it.

A result is unknown if it is not linear in a value with coefficients, or depends on the positions of
samples. An unknown result is refused, with the line where the unknown begins.
"""

from sbp_aten.passes.whole_batch.rewriting import whole_batch_loss

__all__ = ["whole_batch_loss"]
