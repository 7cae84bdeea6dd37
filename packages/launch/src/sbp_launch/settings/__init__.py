"""The settings of a run: from a command line to values that are checked before torch is imported.

`compose` asks Hydra for the config and `refusals` says in our words what Hydra refuses; `catalog`
and `option_file` know the options of all packages, `known_keys`, `option_names` and `callbacks` the
keys and names that somebody may have meant; `check` makes the checked `config` of it, of which
`budget`, `schedules` and `patterns` are parts. `help` prints all of them.
"""
