"""Draws docs/ring.svg: the record of a ring, and one speculative step with its launches and bytes.

    python docs/ring_figure.py        (needs matplotlib)

Every number comes from the geometry of Qwen3.5-27B.
"""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from max.dtype import DType

from gdn_graph.geometry import MODELS

MODEL = MODELS["qwen3.5-27b"]
GEOMETRY = MODEL.geometry
LAYERS = MODEL.layers
DRAFTS = GEOMETRY.ring_len - 1

INK, PAPER = "#1f2430", "#ffffff"
KEY, FACTOR, DECAY, STATE = "#9ecae9", "#ffbf79", "#88d27a", "#d3d7de"


def megabytes(count: float) -> str:
    return f"{count / 1e6:.1f} MB"


def box(
    ax: Axes, x: float, y: float, width: float, height: float, color: str, text: str = ""
) -> None:
    ax.add_patch(Rectangle((x, y), width, height, facecolor=color, edgecolor=INK, linewidth=0.8))
    if text:
        ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=8)


def draw_record(ax: Axes) -> None:
    g = GEOMETRY
    ax.set_title(
        "One record: what a token leaves behind for one key head "
        f"(key head dim {g.key_head_dim}, {g.group} value heads of dim {g.value_head_dim})",
        loc="left",
        fontsize=9,
    )
    box(ax, 0, 0, g.key_head_dim, 1, KEY, "raw key k")
    for head in range(g.group):
        part = g.record_factors(head)
        box(ax, part.start, 0, g.value_head_dim, 1, FACTOR, f"delta factor f of head {head}")
    first = g.record_decay(0)
    box(ax, first, 0, 8, 1, DECAY)
    ax.annotate(
        f"{g.group} decays d",
        (first + 4, 1),
        (first + 4, 1.5),
        ha="center",
        fontsize=8,
        arrowprops={"arrowstyle": "-", "linewidth": 0.8},
    )
    ax.add_patch(
        Rectangle(
            (first + 8, 0), g.record_stride - first - 8, 1, fill=False, hatch="//", linewidth=0.5
        )
    )
    ax.text((first + 8 + g.record_stride) / 2, 1.15, "padding", ha="center", fontsize=8)
    marks = [0, *(g.record_factors(head).start for head in range(g.group)), first]
    for mark in (*marks, g.record_stride):
        ax.text(mark, -0.12, str(mark), ha="center", va="top", fontsize=7)
    ax.text(
        g.record_stride,
        -0.62,
        f"elements, float32; the state of these heads has {g.group} x {g.key_head_dim} x "
        f"{g.value_head_dim} = {g.group * g.key_head_dim * g.value_head_dim}",
        ha="right",
        va="top",
        fontsize=8,
    )
    ax.set_xlim(-8, g.record_stride + 8)
    ax.set_ylim(-1.2, 1.9)


def draw_step(ax: Axes) -> None:
    g, dtype = GEOMETRY, DType.bfloat16
    state = g.recurrent_state_bytes(LAYERS, dtype)
    window = g.conv_state_bytes(LAYERS, dtype)
    ring, conv_ring = g.ring_bytes(LAYERS), g.conv_ring_bytes(LAYERS, dtype)
    ax.set_title(
        f"One step of one request: {DRAFTS} drafts, {LAYERS} layers, bfloat16 pools "
        f"(snapshots would write {megabytes((DRAFTS + 1) * state)} of states)",
        loc="left",
        fontsize=9,
    )
    # The pools below, the launches above them, arrows for what is read and written.
    box(ax, 0.0, 0, 2.6, 0.8, STATE, f"recurrent states\n{megabytes(state)}")
    box(ax, 2.8, 0, 1.6, 0.8, STATE, f"conv windows\n{megabytes(window)}")
    box(ax, 5.2, 0, 1.6, 0.8, FACTOR, f"ring\n{megabytes(ring)}")
    box(ax, 7.0, 0, 1.6, 0.8, KEY, f"conv ring\n{megabytes(conv_ring)}")
    box(ax, 0.4, 2.0, 3.6, 0.8, PAPER, f"verify: {LAYERS} conv + {LAYERS} recurrence launches")
    box(ax, 4.2, 2.0, 1.6, 0.8, PAPER, "acceptance\non the device")
    box(ax, 6.0, 2.0, 2.6, 0.8, PAPER, "commit: 2 launches\nfor all layers")

    def arrow(start: tuple[float, float], end: tuple[float, float], color: str) -> None:
        ax.annotate(
            "", end, start, arrowprops={"arrowstyle": "->", "color": color, "linewidth": 1.2}
        )

    read, write = "#6b7280", "#c2410c"
    arrow((1.0, 0.8), (1.0, 2.0), read)
    arrow((3.4, 0.8), (3.4, 2.0), read)
    arrow((3.7, 2.0), (5.4, 0.8), write)
    arrow((3.9, 2.0), (7.2, 0.8), write)
    arrow((4.0, 2.4), (4.2, 2.4), INK)
    arrow((5.8, 2.4), (6.0, 2.4), INK)
    arrow((6.6, 0.8), (6.8, 2.0), read)
    arrow((8.2, 0.8), (8.2, 2.0), read)
    arrow((6.1, 2.0), (2.4, 0.8), write)
    arrow((6.2, 2.0), (4.2, 0.8), write)
    ax.text(0.0, 1.35, "read", color=read, fontsize=8)
    ax.text(0.0, 1.1, "write", color=write, fontsize=8)
    # The padding of a record is neither written nor read.
    records = ring * g.record_elements / g.record_stride + conv_ring
    ax.text(
        0,
        -0.25,
        f"verify reads {megabytes(state + window)} and writes {megabytes(records)}; commit "
        f"reads {megabytes(records / (DRAFTS + 1))} for each token it keeps, and reads and writes "
        f"{megabytes(state + window)} once.",
        va="top",
        fontsize=8,
    )
    ax.set_xlim(-0.1, 8.8)
    ax.set_ylim(-0.7, 3.0)


def main() -> None:
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "ring", "font.size": 8})
    figure, (record, step) = plt.subplots(
        2, 1, figsize=(9, 5.6), height_ratios=(1, 1.6), layout="constrained"
    )
    for ax in (record, step):
        ax.axis("off")
    draw_record(record)
    draw_step(step)
    figure.savefig(Path(__file__).with_name("ring.svg"), metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
