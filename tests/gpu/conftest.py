import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
# The simulator, and the step that compiles the kernels to PTX.
sys.path[:0] = [str(TESTS / "ptxsim"), str(TESTS.parent / "scripts")]
