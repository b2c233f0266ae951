"""A disk that writes down what is done to it, fails on request, and shows what a kill or a power loss may leave.

As ALICE does it (Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014): operations are logged, and from
each beginning of the log states of a disk are made that its file system may leave.
"""

import contextlib
import fcntl
import functools
import io
import os
import pathlib
import threading
from typing import NamedTuple

CHANGING = ("mkdir", "unlink", "rmdir", "symlink", "rename", "replace", "ftruncate", "fsync", "write", "pwrite", "open")
# Names and contents as they are; half of the last write; only what was synced, file by file and folder by folder; names
# as of the last sync of anything, contents as of each file's own (ext4, xfs); all names, contents as of each one's own.
KINDS = ("killed", "half", "strict", "journal", "ahead")


class Operation(NamedTuple):
    """What was done to a path: the bytes of a write, and where they end; the target of a rename or a link."""

    name: str
    path: str
    target: str = ""
    end: int = 0
    data: bytes = b""


class Written(io.FileIO):
    """A file whose writes go by the disk."""

    disk = None

    def write(self, data):
        return Written.disk.written(self.fileno(), bytes(data), super().write)


class Disk:
    """Stands between a program and a folder while the block runs.

    Parameters
    ----------
    root : pathlib.Path
        What happens elsewhere is not looked at.
    fails : callable
        ``fails(number, name)`` is an error number for an operation that is to fail, else 0. Numbers begin at 1.
    """

    def __init__(self, root, fails=lambda number, name: 0):
        self.root, self.log, self.tried = str(root), [], []
        self._fails, self._lock, self._originals = fails, threading.RLock(), {}

    def __enter__(self):
        Written.disk = self
        for name in (*CHANGING, "fdopen"):
            self._originals[name] = getattr(os, name)
            setattr(os, name, functools.partial(getattr(self, f"_{name}", None) or self._named, name))
        return self

    def __exit__(self, *_):
        for name, original in self._originals.items():
            setattr(os, name, original)

    def _do(self, operation, work):
        """Count an operation, let it fail if it is to, else do it and write it down."""
        with self._lock:
            self.tried.append(operation)
            if number := self._fails(len(self.tried), operation.name):
                raise OSError(number, os.strerror(number), operation.path)
            done = work()
            if operation.name == "write":
                operation = operation._replace(end=operation.end + done, data=operation.data[:done])
            self.log.append(operation)
            return done

    def _below(self, path, folder=None):
        """The path as one below the root; None if it is not."""
        if isinstance(path, int) or folder is not None:
            with contextlib.suppress(OSError):
                base = os.readlink(f"/proc/self/fd/{path if isinstance(path, int) else folder}")
                path = base if isinstance(path, int) else os.path.join(base, path)
        path = os.path.abspath(path) if isinstance(path, str | os.PathLike) else ""
        return path if path.startswith(self.root + os.sep) or path == self.root else None

    def _named(self, name, first, *others, dir_fd=None, **options):
        """Operations that take a path, or a descriptor."""
        given = {**options, **({} if dir_fd is None else {"dir_fd": dir_fd})}
        work = functools.partial(self._originals[name], first, *others, **given)
        target = "" if name != "symlink" else os.fspath(first)
        path = self._below(others[0] if name == "symlink" else first, dir_fd)
        if path is None:
            return work()
        if name in ("rename", "replace"):
            name, target = "rename", self._below(others[0])
        return self._do(Operation(name, path, target, others[0] if name == "ftruncate" else 0), work)

    def _open(self, _, path, flags, *others, **options):
        work = functools.partial(self._originals["open"], path, flags, *others, **options)
        inside = self._below(path, options.get("dir_fd"))
        if inside is None or not flags & (os.O_CREAT | os.O_TRUNC):
            return work()
        return self._do(Operation("open", inside), work)

    def _write(self, _, descriptor, data):
        return self.written(descriptor, bytes(data), functools.partial(self._originals["write"], descriptor))

    def _pwrite(self, _, descriptor, data, begin):
        return self.written(
            descriptor, bytes(data), lambda data: self._originals["pwrite"](descriptor, data, begin), begin
        )

    def written(self, descriptor, data, write, begin=None):
        """A write to a file, where it stands if no place is given."""
        path = self._below(descriptor)
        if path is None:
            return write(data)
        with self._lock:
            if begin is None:
                appends = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_APPEND
                begin = os.fstat(descriptor).st_size if appends else os.lseek(descriptor, 0, os.SEEK_CUR)
            return self._do(Operation("write", path, "", begin, data), lambda: write(data))

    def _fdopen(self, _, descriptor, mode="r", buffering=-1, **options):
        if mode == "wb" and self._below(descriptor):
            return io.BufferedWriter(Written(descriptor, "wb"), 1 << 16 if buffering < 2 else buffering)
        return self._originals["fdopen"](descriptor, mode, buffering, **options)


class File:
    """Its bytes, and those that are durable."""

    def __init__(self):
        self.data, self.synced = b"", b""


class Folder:
    """Its names, and those that are durable."""

    def __init__(self):
        self.names, self.synced = {}, {}


class States:
    """What a disk may look like after each operation of a log.

    Parameters
    ----------
    root : str
        Its folder, which was empty.
    """

    def __init__(self, root):
        self._root, self._top, self._journal, self._half = root, Folder(), {}, None

    def _at(self, path):
        node = self._top
        for part in pathlib.PurePath(path).relative_to(self._root).parts:
            node = node.names[part]
        return node

    def _place(self, path):
        return self._at(pathlib.PurePath(path).parent).names, pathlib.PurePath(path).name

    def do(self, operation):
        """One operation more."""
        name, path, target, end, data = operation
        self._half = None
        if name == "fsync":
            node = self._at(path)
            node.synced = node.data if isinstance(node, File) else dict(node.names)
            self._journal = tree(self._top, lambda folder: folder.names)
        elif name == "write":
            node, begin = self._at(path), end - len(data)
            self._half = node, node.data[:begin].ljust(begin, b"\0") + data[: len(data) // 2]
            node.data = node.data[:begin].ljust(begin, b"\0") + data + node.data[end:]
        elif name == "ftruncate":
            node = self._at(path)
            node.data = node.data[:end].ljust(end, b"\0")
        elif path != self._root:
            names, own = self._place(path)
            if name == "open":
                names.setdefault(own, File())
            elif name == "mkdir":
                names[own] = Folder()
            elif name == "symlink":
                names[own] = target
            elif name == "rename":
                others, other = self._place(target)
                others[other] = names.pop(own)
            else:
                del names[own]

    def files(self, kind):
        """What may be left now: the bytes, the target of a link, or the content of a folder by each name."""
        if kind == "journal":
            found = self._journal
        else:
            found = tree(self._top, lambda folder: folder.synced if kind == "strict" else folder.names)
        return contents(found, lambda file: self._content(file, kind))

    def _content(self, file, kind):
        if kind not in ("killed", "half"):
            return file.synced
        return self._half[1] if kind == "half" and self._half and self._half[0] is file else file.data


def tree(folder, names_of):
    """The names in a folder and in those below it."""
    return {name: tree(node, names_of) if isinstance(node, Folder) else node for name, node in names_of(folder).items()}


def contents(names, content_of):
    """The same with the contents of files."""
    return {
        name: contents(node, content_of)
        if isinstance(node, dict)
        else node
        if isinstance(node, str)
        else content_of(node)
        for name, node in names.items()
    }


def lay_out(files, folder):
    """Write such a state into a new folder."""
    folder.mkdir(mode=0o700)
    for name, content in files.items():
        if isinstance(content, dict):
            lay_out(content, folder / name)
        elif isinstance(content, str):
            (folder / name).symlink_to(content)
        else:
            (folder / name).write_bytes(content)
            (folder / name).chmod(0o600)


def found_in(folder):
    """A folder's files as ``States.files`` gives them."""
    return {
        path.name: os.readlink(path) if path.is_symlink() else found_in(path) if path.is_dir() else path.read_bytes()
        for path in folder.iterdir()
    }
