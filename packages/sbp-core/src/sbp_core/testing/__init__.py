"""Conformance suites of the plugins that need no tensors, and material for tests of the core.

| kind | suite | to supply |
|---|---|---|
| callback | `callback.CallbackConformance` | `make_callback` |
| cluster | `cluster_suite.ClusterConformance` | `make_factory` |
| launcher | `launcher.LauncherConformance` | `make_launcher` |
| logger | `logger.MetricSinkConformance` | `make_factory`, `read` |
| planner | `planner.PlannerConformance` | `make_planner` |
| storage | `storage.StorageConformance` | `make_factory` |

The suites of the other kinds are in `sbp_torch.testing`. `example_calls`, `graphs` and `plans` make
calls, signatures, graphs, machines and plans by hand; `edits` makes random edits, `fuzz` feeds them
to the readers of files, and `files` lists the kinds of files that the core reads; `holdings` and
`signals` are about the process that runs the tests; `marks` and `slow` about marks of pytest;
`forked_programs` runs programs in forks of one process; `suites` and `plugin_check` check plugins.

Subclass a suite in a test module under a name that begins with `Test`; pytest finds its tests. The
suites of the table import no pytest, and nothing is imported here.
"""
