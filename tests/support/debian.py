"""Packages of Debian that tests want beside the environment."""

import contextlib
import os
import shutil
import subprocess


def install(packages: tuple[str, ...]) -> None:
    """Install them where this process may; say nothing where it may not, or where there is no source for them."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return
    apt = ["apt-get", "-q", "-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=15"]
    apt += ["-o", "DPkg::Lock::Timeout=150"]  # two workers at once
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}

    def succeeds(*arguments: str) -> bool:
        done = subprocess.run([*apt, *arguments], env=environment, capture_output=True, timeout=200, check=False)
        return done.returncode == 0

    command = ("install", "-y", "--no-install-recommends", *packages)
    with contextlib.suppress(subprocess.TimeoutExpired):
        if not succeeds(*command) and succeeds("update"):
            succeeds(*command)
