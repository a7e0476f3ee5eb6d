"""The command: what exists is listed, what does not is refused, every listed module has a `main`."""

from importlib import import_module

import pytest

from epilora import cli


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    for name, (_, about) in cli.COMMANDS.items():
        assert name in out
        assert about in out


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["no-such-command"]) == 2
    assert "unknown command 'no-such-command'" in capsys.readouterr().err


def test_every_command_has_a_main() -> None:
    for module, _ in cli.COMMANDS.values():
        assert callable(import_module(module).main)


def test_arguments_and_status_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.COMMANDS, "again", ("epilora.cli", "itself"))
    assert cli.main(["again", "no-such-command"]) == 2
    assert cli.main(["again", "--help"]) == 0
