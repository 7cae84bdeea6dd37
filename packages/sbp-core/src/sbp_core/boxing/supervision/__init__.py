"""Starting the ranks of a run, and seeing to it that all of them end.

`start` says what is to be started, `meet` does so for processes that meet at an address,
`supervise` starts it, `ended` is how it went, `culprit` who of a launcher's ranks fell first, and
`keeper` ends what is left if the supervisor itself is killed. Imports no torch.
"""
