"""Conformance suites: tests that the author of a plugin can run, one suite for each kind of plugin.

| kind | suite | to supply |
|---|---|---|
| boxing | `boxing.BoxingConformance` | `run_ranks` |
| runtime | `runtime.RuntimeConformance` | `make_runtime` |
| planner | `planner.PlannerRunConformance` | `make_planner` |
| model | `model.ModelConformance` | `make_model`, `make_batch` |
| data | `data.DatasetConformance` | `make_dataset` |
| optimizer | `optimizer.OptimizerConformance` | `make_factory` |
| pass | `graph_pass.GraphPassConformance` | `make_pass` |
| signature | `signatures.check_rule` | samples |

Suites that need no tensors are in `sbp_core.testing`: for clusters, metric sinks, and planners
without a run.

Subclass a suite in a test module under a name that begins with `Test`; pytest finds its tests. The
modules import no pytest, and nothing is imported here.
"""
