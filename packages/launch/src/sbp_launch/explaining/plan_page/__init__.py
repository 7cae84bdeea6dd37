"""A plan as one page: an HTML file that needs no other file, no network and no server.

    summary     time, bytes, memory, why
    mesh        ranks, stages, nodes
    model       a tree of modules, with the SBP of parameters and outputs by mesh axis
    timeline    the simulated step
    memory      over that step, by kind, of the fullest rank of each stage
    traffic     bytes by collective and link

`page` puts these together, with `model` and `charts`. The page is whole without its script, which
opens, filters and enlarges.

Stability: internal.
"""

from __future__ import annotations

from sbp_launch.explaining.plan_page.page import plan_page

__all__ = ["plan_page"]
