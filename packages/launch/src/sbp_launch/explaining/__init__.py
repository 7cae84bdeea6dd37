"""Why a plan is as it is, and what another one would cost.

`question` reads what `why=` and `compare=` ask. `compare` is what a plan costs, and prints two of
them side by side; `reasons` says what travels in one and not in another, and puts it in a sentence;
`why` makes the plans that answer `why=`, and prints them. `plan_page` is a plan as one HTML file.
"""
