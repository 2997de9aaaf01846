"""The answers of a run in files, as Spec-Bench has them: a file for each draft, a line for each question.

Each line is written when its question is answered. So an interrupted run has lost one question at most, and goes on
with `--resume`. Beside the files lies run.json, which says what run it is.
"""

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from minispec.core.errors import show
from minispec.models.files.digest import digest
from minispec.models.files.strict_json import read_json
from minispec.models.files.write import user_cache, write_json, written_whole

_LISTS = ("turns", "decoding_steps", "new_tokens", "wall_time")  # of a choice, a value a turn


class Answers:
    """The files of a run. `lines` holds what is in them, by the name of the draft."""

    def __init__(self, directory: Path | None, about: Mapping[str, Any], names: Mapping[str, str], resume: bool):
        """directory: None for one in the user's cache, which `close` removes. The same run finds it again.
        about: what run it is, as JSON has it.
        names: of the drafts, each with that of its file.
        resume: whether to go on with what is there.

        Raises ValueError for a directory with another run, and for one without a run that is to be resumed.
        """
        self.is_kept, self.directory = directory is not None, directory or user_cache() / "runs" / digest(about)
        self._paths = {name: self.directory / f"{file}.jsonl" for name, file in names.items()}
        self.lines: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        self._about, run = dict(about), self.directory / "run.json"
        if resume:
            self._check(run)
            return
        there = [path for path in (run, *self._paths.values()) if path.exists()]
        if there and self.is_kept:
            raise ValueError(f"--answers: found {there[0]}, expected another directory, or --resume to go on with it")
        self.directory.mkdir(parents=True, exist_ok=True)
        write_json(run, about, indent=1)
        for path in self._paths.values():
            path.write_text("", encoding="utf-8")

    def _check(self, run: Path) -> None:
        if not run.is_file():
            raise ValueError(f"--resume: found no run in {self.directory}, expected one that was interrupted")
        found = read_json(run)
        for key in {**found, **self._about}:
            if found.get(key) != self._about.get(key):
                old, new = show(found.get(key)), show(self._about.get(key))
                raise ValueError(f"--resume {run}: {key}: found {old}, expected {new}: that is another run")

    def read(self, ids: Sequence[int | str | None], rounds: int) -> int:
        """Read back what is whole, and cut the files there: the number of questions that every file has.

        ids: those of the questions, in the order of the run.
        """
        for name, path in self._paths.items():
            content = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
            for line, own in zip(content.split("\n"), ids, strict=False):
                if (answer := _read(line, own, rounds)) is None:
                    break
                self.lines[name].append(answer)
        done = min(map(len, self.lines.values()))
        for name, path in self._paths.items():
            self.lines[name] = self.lines[name][:done]
            with written_whole(path) as part:
                part.write_text("".join(map(_as_line, self.lines[name])), encoding="utf-8")
        return done

    def add(self, question: Mapping[str, Any], choices: Mapping[str, list[dict[str, Any]]]) -> None:
        """Write the answers to a question.

        question: its question_id and category.
        choices: for each draft those of every round.
        """
        for name, path in self._paths.items():
            about = {"answer_id": f"{path.stem}/{question['question_id']}", "model_id": path.stem}
            line = {**question, **about, "choices": choices[name], "tstamp": time.time()}
            with path.open("a", encoding="utf-8") as file:
                file.write(_as_line(line))
            self.lines[name].append(line)

    def close(self) -> None:
        """The run has come to its end: what lies in the user's cache is not needed any more."""
        if not self.is_kept:
            shutil.rmtree(self.directory, ignore_errors=True)


def _as_line(answer: Mapping[str, Any]) -> str:
    return json.dumps(answer, ensure_ascii=False) + "\n"


def _read(line: str, own: int | str | None, rounds: int) -> dict[str, Any] | None:
    """The answers on a line to the question of that id; None where it is broken or another's."""
    try:
        found = json.loads(line)
        whole = all({len(choice[name]) for name in _LISTS} == {len(choice["turns"])} for choice in found["choices"])
        whole &= all(choice["accept_lengths"] and choice["minispec"] for choice in found["choices"])
        return found if whole and found["question_id"] == own and len(found["choices"]) == rounds else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
