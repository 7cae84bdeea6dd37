"""Explanations of a plan (`explain=`, `compare=` and `page=` of `sbp-plan`).

`question` parses `explain=` and `compare=`. `compare` prints the costs of two plans side by side.
`reasons` explains in a sentence why one plan is slower or larger than another. `alternatives` makes
the plans that answer `explain=`. `plan_page` writes a plan as one HTML file.
"""
