"""One run, whatever it does: its values, its folder, what it shows, and how it is stopped.

`run` is the value that everything is handed, `folder` where it leaves its files: the config, which
every rank reads, `environment`, `metrics` and `result`. `progress` and `speed` show how far it is;
`status` says what it is at, and `stopping` is what signals do to it.
"""
