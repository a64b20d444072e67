import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
# The simulator, the step that compiles the kernels to PTX, and the kernels on NumPy arrays.
sys.path[:0] = [str(TESTS / "ptxsim"), str(TESTS.parent / "scripts"), str(TESTS / "gpu")]
