"""Conformance suites: what a plugin of each kind must do, as tests that its author can run.

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

The suites of clusters and metric sinks need no tensors: they are in `sbp_core.testing`, and so is
that of planners without a run.

Subclass a suite in a test module under a name that begins with `Test`; pytest finds its tests. The
modules import no pytest, and nothing is imported here.
"""
