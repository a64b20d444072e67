"""This checkout against another commit of it, in one run."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import gdn_graph

NOW = "now"
_PACKAGE: Final = Path(gdn_graph.__file__).resolve().parent


@contextmanager
def trees(commit: str) -> Iterator[dict[str, Path]]:
    """Yields {"now": this checkout, the commit's short hash: a checkout of it}.

    The second is a temporary git worktree.

    Raises:
        ValueError: If this package is not in a git checkout, or the commit is not in it.
    """
    root = _checkout()
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
    try:
        root = _checkout()
    except ValueError:
        return ""
    head = _git(root, "rev-parse", "--short", "HEAD")
    if head.returncode != 0:
        return ""
    changed = _git(root, "status", "--porcelain", "--untracked-files=no", _PACKAGE.name)
    return head.stdout.strip() + ("+" if changed.stdout else "")


def _checkout() -> Path:
    """The top of the git checkout that this package is in, not of one that merely holds it."""
    root = _PACKAGE.parent
    top = _git(_PACKAGE, "rev-parse", "--show-toplevel")
    if top.returncode != 0 or Path(top.stdout.strip()) != root:
        raise ValueError(
            f"bench: --against needs a git checkout of gdn-graph, and {_PACKAGE} is not in one; "
            "run it from a checkout, installed with pip install -e"
        )
    return root


def _git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True)
    except FileNotFoundError:
        raise ValueError("bench: --against needs git, which is not installed") from None
