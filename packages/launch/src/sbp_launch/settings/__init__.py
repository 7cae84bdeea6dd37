"""The settings of a run: from a command line to values that are checked before torch is imported.

`compose` composes the config with Hydra, and `refusals` rewrites the errors of Hydra. `catalog` has
the options of all packages. `known_keys` and `option_names` find the keys and names that a user may
have meant; `resumed` has the settings of an earlier run. `check` makes the checked `config`, with
the parts `budget` and `patterns`. `help` makes the help text for all settings.
"""
