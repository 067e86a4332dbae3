"""The project's virtual environments: one per Python version, at ``<checkout>/.venv/<major.minor>``.

Standard library only. ``enter()`` returns inside the environment or does not return. An environment is
trusted when its stamp names this pyproject.toml, this Python and this checkout (an editable install points
to one checkout; a copied tree must not import the original).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path


class InstallError(Exception):
    """The environment cannot be made; the text ends with what the tool said."""


def enter(checkout: Path, announce: Callable[[str], None]) -> None:
    """Go on in the environment of the running Python version, installing it when its stamp is not valid."""
    version = "{}.{}".format(*sys.version_info)
    directory = checkout / ".venv" / version
    python = directory / "bin/python"
    stamp = directory / ".stamp"
    wanted = _fingerprint(checkout)
    if not _matches(stamp, wanted):
        directory.parent.mkdir(exist_ok=True)
        with (directory.parent / f"{version}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _matches(stamp, wanted):  # nobody else installed it while we waited
                _install(checkout, directory, announce)
                stamp.write_text(wanted)
    if Path(sys.prefix).resolve() != directory.resolve():
        os.execv(python, [str(python), *sys.argv])  # noqa: S606 - no shell: the same command, inside


def _install(checkout: Path, directory: Path, announce: Callable[[str], None]) -> None:
    python = directory / "bin/python"
    announce(f"installing the checkout in .venv/{directory.name} (once, about a minute) ...")
    began = time.monotonic()
    (directory / ".stamp").unlink(missing_ok=True)
    if not _is_this_python(python):
        hint = "on Debian and Ubuntu: apt install python3-venv"
        _run([sys.executable, "-m", "venv", "--clear", str(directory)], f"no virtual environment; {hint}")
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    _run([*pip, "-e", f"{checkout}[dev]"], "pip could not install the checkout")
    announce(f"installed in {time.monotonic() - began:.0f} s")


def _fingerprint(checkout: Path) -> str:
    parts = (checkout / "pyproject.toml").read_bytes(), platform.python_version().encode(), bytes(checkout)
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def _matches(stamp: Path, wanted: str) -> bool:
    try:
        return stamp.read_text() == wanted
    except FileNotFoundError:
        return False


def _is_this_python(python: Path) -> bool:
    """Tell whether the environment's interpreter works and is of the running version."""
    question = "import platform; print(platform.python_version())"
    try:
        answer = subprocess.run([python, "-c", question], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return False
    return answer.strip() == platform.python_version()


def _run(command: list[str], failure: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise InstallError(f"{failure}:\n{done.stdout[-4000:]}")
