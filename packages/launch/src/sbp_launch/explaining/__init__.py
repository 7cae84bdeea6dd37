"""Why a plan is as it is, and what another plan would cost.

`question` reads the texts of `explain=` and `compare=`. `compare` prints the cost of two plans side
by side. `reasons` says which communication one plan has and the other does not, in a sentence.
`alternatives` makes the plans that answer `explain=`. `plan_page` is a plan as one HTML file.
"""
