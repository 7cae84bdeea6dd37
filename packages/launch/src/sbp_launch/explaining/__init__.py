"""Why a plan is as it is, and what another one would cost.

`figures` is what a plan costs. `question` reads what `why=` asks, `alternatives` makes the plans
that answer it, `differences` says what travels in one plan and not in another, `reasons` puts it in
a sentence, and `why` prints all of it; `compare` prints two plans side by side, `feasible` looks
for settings with which a plan fits. `plan_page` is a plan as one HTML file.

Stability: internal.
"""
