"""Which commit is measured; imports nothing, so that a script that only starts others has it at once."""

import subprocess
from pathlib import Path


def commit_of(root: Path) -> str:
    """The commit that is checked out, with a mark where files differ from it; empty without git."""
    try:
        said = [
            subprocess.run(["git", "-C", str(root), *command], capture_output=True, text=True, check=True).stdout
            for command in (["rev-parse", "--short=10", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        ]
    except (OSError, subprocess.CalledProcessError):
        return ""
    return said[0].strip() + ("+" if said[1].strip() else "")
