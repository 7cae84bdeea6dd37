"""The settings of a run: from a command line to values that are checked before torch is imported.

`compose` asks Hydra for the config and `refusals` says in our words what Hydra refuses; `catalog`
knows the options of all packages, `known_keys` and `option_names` the keys and names that somebody
may have meant, `resumed` the settings of an earlier run; `check` makes the checked `config` of it,
of which `budget` and `patterns` are parts. `help` prints all of them.
"""
