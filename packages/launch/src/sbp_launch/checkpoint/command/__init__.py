"""The command `sbp-checkpoint`: look at checkpoints, verify, convert, compare and remove them.

`app` reads the command line, and has a module for each of its verbs: `inspect`, `verify`,
`convert`, `diff` and `prune`. `names` chooses and renames tensors; `table` prints.
"""
