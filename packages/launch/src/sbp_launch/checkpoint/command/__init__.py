"""The command `sbp-checkpoint`: look at checkpoints, verify, convert, compare and remove them.

`app` reads the command line, and has a module for its verbs: `inspect`, `verify` (which is `prune`,
too), `convert` and `diff`.
"""
