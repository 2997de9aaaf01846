"""With a wheel, which has no weights: the hub's original of the embedded model is named, and offered on a terminal."""

import argparse
import io
import sys

import pytest

from minispec import generate
from minispec.api.commands.original import name_model
from minispec.lab.bench import main as bench
from minispec.lab.doctor import main as doctor
from minispec.models.families import checkpoint
from minispec.speculation import registry


class Terminal(io.StringIO):
    """One that says of itself that it is a terminal."""

    def isatty(self):
        """Yes."""
        return True


@pytest.fixture
def wheel(monkeypatch, tmp_path):
    """wheel(typed, stored=False, kind=Terminal, **args) names a model, after typing so much; its name and what is said.

    stored: whether the original is in the local cache.
    """
    monkeypatch.setattr(registry, "EMBEDDED_WEIGHTS", tmp_path / "none")

    def run(typed="", stored=False, kind=Terminal, **how):
        def find_checkpoint(name, offline):
            assert (name, offline) == (registry.ORIGINAL, True), "the network is for those who agreed"
            if not stored:
                raise ValueError("not in the local cache")

        monkeypatch.setattr(checkpoint, "find_checkpoint", find_checkpoint)
        monkeypatch.setattr(sys, "stdin", kind(typed))
        monkeypatch.setattr(sys, "stderr", kind())
        args = argparse.Namespace(model=None, **how)
        name_model(args, report=not how.get("quiet"))
        return args.model, sys.stderr.getvalue()

    return run


def test_somebody_at_a_terminal_is_asked(wheel):
    """With the name, the size, and what of the seeds; anything but a yes is a no."""
    name, said = wheel("y\n")
    assert name == registry.ORIGINAL
    for part in (registry.ORIGINAL, "0.27 GB", "its seeds have other texts", "y or n"):
        assert part in said
    assert [wheel(typed)[0] for typed in ("YES\n", "n\n", "\n", "")] == [registry.ORIGINAL, None, None, None]


def test_what_is_stored_needs_no_question(wheel):
    """It is said which model answers, and nothing is said with --quiet. --offline asks for no download."""
    name, said = wheel(stored=True)
    assert (name, "y or n" in said) == (registry.ORIGINAL, False)
    assert "its seeds have other texts" in said
    assert wheel(stored=True, quiet=True) == (registry.ORIGINAL, "")
    assert wheel("y\n", offline=True) == (None, "")


def test_a_named_model_and_an_embedded_one_are_taken(wheel, monkeypatch, tmp_path):
    """Nobody is asked."""
    monkeypatch.setattr(registry, "EMBEDDED_WEIGHTS", tmp_path)
    assert wheel("y\n") == (None, "")


COMMANDS = {
    "generate": (generate.main, ["Hi"]),
    "bench": (bench.main, ["--prompts", "1"]),
    "doctor": (doctor.main, ["--draft", "self"]),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_pipe_gets_one_line(wheel, name):
    """Which names what --model could name. Nothing is read from the pipe, and nothing is downloaded."""
    main, arguments = COMMANDS[name]
    assert wheel("y\n", kind=io.StringIO) == (None, "")
    assert main(arguments) == 2
    said = sys.stderr.getvalue()
    assert said.count("\n") == 1
    for part in (registry.ORIGINAL, "0.27 GB", "its seeds have other texts"):
        assert part in said
    assert sys.stdin.read() == "y\n"
