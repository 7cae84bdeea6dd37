"""Random problems, and the files of the IOPDDL contest; no other module needs these."""
