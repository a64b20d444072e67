"""Gated DeltaNet speculative decoding for MAX: custom ops and the graphs around them."""

from . import ops
from .geometry import GatedDeltaGeometry
from .library import kernel_library, overlay
from .timers import timer_slack

__all__ = ["GatedDeltaGeometry", "kernel_library", "ops", "overlay", "timer_slack"]
