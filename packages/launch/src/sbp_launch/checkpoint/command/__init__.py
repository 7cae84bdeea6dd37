"""The command `sbp-checkpoint`: inspect, verify, convert, compare and remove checkpoints.

`app` parses the command line. The subcommands are in `inspect`, `verify` (with `prune`), `convert`
and `diff`.
"""
