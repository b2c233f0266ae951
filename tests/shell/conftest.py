"""The command line, called in this process: an interpreter for every call would take most of the time."""

import sys
import types

import pytest

from phalanx.cli.app import main


@pytest.fixture
def here(monkeypatch, capsys):
    """``here(*arguments, cwd=folder)``: exit code, stdout and stderr, as ``phalanx_command`` gives them."""

    def called(*arguments, cwd):
        monkeypatch.chdir(cwd)
        monkeypatch.setattr(sys, "argv", ["phalanx", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return types.SimpleNamespace(returncode=ended.value.code or 0, stdout=out, stderr=err)

    return called
