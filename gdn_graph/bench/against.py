"""This checkout against another commit of it, in one run."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gdn_graph

NOW = "now"


@contextmanager
def trees(commit: str) -> Iterator[dict[str, Path]]:
    """Yields {"now": this checkout, the commit's short hash: a checkout of it}.

    The second is a temporary git worktree.

    Raises:
        ValueError: If this package is not in a git checkout, or the commit is not in it.
    """
    package = Path(gdn_graph.__file__).resolve().parent
    root = package.parent
    top = _git(package, "rev-parse", "--show-toplevel")
    if top.returncode != 0 or Path(top.stdout.strip()) != root:
        raise ValueError(
            f"bench: --against needs a git checkout of gdn-graph, and {package} is not in one; run "
            "it from a checkout, installed with pip install -e"
        )
    found = _git(root, "rev-parse", "--short", "--verify", "--quiet", f"{commit}^{{commit}}")
    if found.returncode != 0:
        raise ValueError(f"bench: --against is {commit!r}; need a commit of {root}")
    label = found.stdout.strip()
    with tempfile.TemporaryDirectory(prefix="gdn-graph-against-") as folder:
        tree = Path(folder) / "tree"
        added = _git(root, "worktree", "add", "--detach", str(tree), label)
        if added.returncode != 0:
            raise ValueError(f"bench: git worktree add failed: {added.stderr.strip()}")
        try:
            yield {NOW: root, label: tree}
        finally:
            _git(root, "worktree", "remove", "--force", str(tree))


def commit() -> str:
    """The short hash of this checkout, with a + if files differ from it; "" if it is none."""
    folder = Path(gdn_graph.__file__).resolve().parent
    try:
        head = _git(folder, "rev-parse", "--short", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no", ".")
    except ValueError:
        return ""
    if head.returncode != 0:
        return ""
    return head.stdout.strip() + ("+" if changed.stdout else "")


def _git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True)
    except FileNotFoundError:
        raise ValueError("bench: --against needs git, which is not installed") from None
