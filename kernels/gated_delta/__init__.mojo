"""Gated DeltaNet ops for MAX: importing this package registers every op of ops.mojo.

ops.mojo checks the operands (checks.mojo) and dispatches to cpu/ or gpu/; ring.mojo is the
layout of a ring record, activation.mojo what SiLU and the gates compute.
"""

from .ops import *
