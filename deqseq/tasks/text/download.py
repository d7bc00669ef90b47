"""Source distributions of the Python package index, as a place where texts are."""

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """Where downloads are kept: ``deqseq`` in ``$XDG_CACHE_HOME``, or in ``~/.cache``.

    Example:
        >>> cache_folder().name
        'deqseq'
    """
    named = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(named) if os.path.isabs(named) else Path.home() / ".cache") / "deqseq"


def fetch_sdist(name: str, version: str, sha256: str, folder: Path) -> Path:
    """A package's source distribution, downloaded by pip the first time, with the user's own index settings.

    The file is written beside its place and renamed when it is complete and checked, so that processes may do this at
    the same time, and an interruption leaves nothing half done. pip compares the digest before it looks inside; it
    then asks the package's build for its metadata, in an environment of its own, for which it may download setuptools.

    Args:
        name: of the package, as in the name of the file.
        version: of it.
        sha256: digest of the file, hexadecimal.
        folder: where it is kept; created if missing.

    Returns:
        The file ``name-version.tar.gz``.

    Raises:
        OSError: pip cannot download it; says why, and where to put the file by hand.
        ValueError: the file that is there is another one.
    """
    target = folder / f"{name}-{version}.tar.gz"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="unfinished-", dir=folder) as unfinished:
            os.replace(_download(name, version, sha256, Path(unfinished), target), target)
    found = hashlib.sha256(target.read_bytes()).hexdigest()
    if found != sha256:
        raise ValueError(f"{target} must have the sha256 {sha256}, got {found}: remove it to download it again")
    return target


def _download(name: str, version: str, sha256: str, folder: Path, target: Path) -> Path:
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{name}=={version} --hash=sha256:{sha256}\n")
    options = ["--no-deps", f"--no-binary={name}", "--quiet", "--no-input"]
    command = [sys.executable, "-m", "pip", "download", *options, "--requirement", str(requirements)]
    run = subprocess.run([*command, "--dest", str(folder)], capture_output=True, text=True, check=False)
    file = folder / target.name
    if run.returncode or not file.exists():
        said = "\n".join((run.stderr or run.stdout).strip().splitlines()[-8:])
        raise OSError(
            f"pip could not download {name}=={version}. Get {target.name} from "
            f"https://pypi.org/project/{name}/{version}/#files and put it into {target.parent}. pip said:\n{said}"
        )
    return file
