"""Which files of the package a run really enters, and which CONTRIBUTING names: ``python -m tests.walks.walking``."""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
GUIDE = ROOT / "CONTRIBUTING.md"
WALK = re.compile(r"^### (.+)\n((?:(?!#).*\n)+)", re.MULTILINE)
ROW = re.compile(r"^- \*\*(caller|worker|zygote)\*\*: (.+(?:\n  .+)*)$", re.MULTILINE)
NAMED = re.compile(r"`([\w/]+(?:\.py)?)`")  # a file, or a folder
WORKER = "engines/processes/worker.py"
JOBS = {"workers": (0, 1), "killed": (2,)}  # which walks of the guide are compared with a job


def walks(text):
    """The walks of the guide: for each, the files that it names by the process that enters them."""
    return [
        {who: re.findall(r"`([\w/]+\.py)`", row) for who, row in ROW.findall(body)} for _, body in WALK.findall(text)
    ]


def rows(text):
    """The table of the guide: for each change the files of the package to look at, and its tests."""
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    named = [[NAMED.findall(cell) for cell in row[1:]] for row in cells[1:]]
    return {row[0]: found for row, found in zip(cells[1:], named, strict=True)}


def noted(command):
    """What a command prints, and the lines of the recorder in all its processes."""
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder, "log")
        path = os.pathsep.join(map(str, (HERE / "startup", ROOT / "src", ROOT)))
        environment = os.environ | {"WALK": str(log), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout, log.read_text().splitlines()


def entered(job):
    """The files that processes of a job enter, in order: of the caller, of workers, of the zygote.

    Of a job in which a worker is killed, what is entered from then on.
    """
    caller, lines = noted([str(HERE / "job.py"), job])
    return sorted_out(lines, caller.strip())


def entered_by(tests):
    """The files that tests enter, in any process."""
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "", *(f"{HERE.parent}/{test}" for test in tests)]
    return {line.split(" ")[1] for line in noted(command)[1]}


def sorted_out(lines, caller):
    """Files by the process that entered them, from the last line on by which the caller said that it begins."""
    begun = max(number for number, line in enumerate(lines) if line == f"{caller} ")
    older = {line.split()[0] for line in lines[:begun]}
    files = {}
    for process, path in (line.split(" ") for line in lines[begun:]):
        if path and (process == caller or process not in older):
            files.setdefault(process, []).append(path)
    found = {"caller": files.pop(caller, []), "worker": [], "zygote": []}
    for paths in files.values():
        who = "worker" if WORKER in paths else "zygote"
        found[who] += [path for path in dict.fromkeys(paths) if path not in found[who]]
    return found


def missed(walk, found):
    """Files that a walk names for a process, and that no such process enters."""
    return [f"{who}: {path}" for who, paths in walk.items() for path in paths if path not in found[who]]


def main():
    """Print what is entered, and what the guide says that is not so."""
    for job in ("inline", "workers", "killed"):
        found = entered(job)
        for who, paths in found.items():
            print(f"{job}, {who}: {len(paths)} files\n  {' '.join(paths)}")
        for number in JOBS.get(job, ()):
            walk = walks(GUIDE.read_text())[number]
            files = sum(map(len, walk.values()))
            print(f"walk {number + 1} of the guide: {files} files, not entered: {missed(walk, found)}")


if __name__ == "__main__":
    main()
