"""The benchmark: these ops against C, libraries and the limits of the machine, in one run.

`shapes` says what is computed, `problems` gives its inputs and what is right, `peers` and the
modules beside it compute it, each in a `worker` process of its own, `run` asks them in turn, and
`report` and `plots` show what came out.

A worker may belong to another checkout than this package does (`compare`), so the modules that it
imports name what they measure in full, gdn_graph.ops, and each other by relative imports.
"""
