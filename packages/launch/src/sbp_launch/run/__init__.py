"""One run of any command: its settings, folder, output, and reaction to signals.

`run` is the object that all stages receive. `folder` is the run folder with the config, which every
rank reads; `environment`, `metrics` and `result` write further files there. `progress` and `speed`
show progress; `status` reports what the ranks are doing, and `stopping` handles Ctrl-C and signals.
"""
