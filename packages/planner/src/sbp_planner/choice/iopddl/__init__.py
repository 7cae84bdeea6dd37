"""Random problems, and the files of the IOPDDL contest; nothing else needs these."""
