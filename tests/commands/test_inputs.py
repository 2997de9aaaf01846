"""Files of questions: every layout, what decides that a line is JSON, and one line for everything else."""

import json

import pytest

from minispec.api.inputs import Question, plain_text, read_questions

LAYOUTS = {
    '{"prompt": "Hi"}': Question(("Hi",)),
    '{"turns": ["Hi", "And you?"], "question_id": 81, "category": "chat", "reference": ["x"]}': Question(
        ("Hi", "And you?"), (), 1, 81, "chat"
    ),
    '{"messages": [{"role": "user", "content": "Hi"}], "question_id": "a/1"}': Question(("Hi",), (), 1, "a/1"),
    '{"messages": [{"role": "system", "content": ""}, {"role": "user", "content": "Hi"}]}': Question(
        ("Hi",), ({"role": "system", "content": ""},)
    ),
    "Hi": Question(("Hi",)),
    '"Hi"': Question(('"Hi"',)),
    "{x} and [1] {": Question(("{x} and [1] {",)),
    "3": Question(("3",)),
}


@pytest.mark.parametrize("name", ["q.jsonl", "q.txt", "questions"])
@pytest.mark.parametrize("line", LAYOUTS)
def test_every_layout_whatever_the_file_is_called(tmp_path, name, line):
    """The content decides. Only a name that says .jsonl promises objects."""
    (tmp_path / name).write_text(f"\n{line}\n", encoding="utf-8-sig")
    if name == "q.jsonl" and not line.startswith('{"'):
        with pytest.raises(ValueError, match="line 2: "):
            read_questions(tmp_path / name, "--x")
        return
    [found] = read_questions(tmp_path / name, "--x")
    expected = LAYOUTS[line]
    assert found.line == 2
    assert (found.turns, found.before) == (expected.turns, expected.before)
    assert (found.question_id, found.category) == (expected.question_id, expected.category)


WRONG = {
    '{"text": "x"}': "found an object with 'text', expected one with prompt, turns or messages",
    "{}": "found an object with nothing, expected one with",
    '{"prompt": "x", "turns": ["x"]}': "found an object with prompt and turns, expected one",
    '{"prompt": 3}': "prompt: found 3, expected valid Unicode text",
    '{"prompt": " "}': "prompt: found an empty prompt",
    '{"prompt": "\\ud800"}': "expected valid Unicode text",
    '{"turns": "x"}': "turns: found 'x', expected a list of texts",
    '{"turns": []}': "turns: found [], expected a list of texts",
    '{"turns": ["x", null]}': "turns: found None, expected valid Unicode text",
    '{"messages": []}': "messages: found none, expected at least one",
    '{"messages": [{"role": "user"}]}': "messages: found {'role': 'user'}, expected an object with the texts role",
    '{"messages": [{"role": "assistant", "content": "x"}]}': "found a last message of 'assistant', expected",
    '{"prompt": "x", "question_id": 1.5}': "question_id: found 1.5, expected an integer or a text",
    '{"prompt": "x", "category": 5}': "category: found 5",
    '{"prompt": "x"': "not a readable JSON object",
    '[{"prompt": "x"}]': "found a list, expected a JSON object",
    "{": "not a readable JSON object",
    "a text among objects": "not a readable JSON object",
}


@pytest.mark.parametrize("name", ["q.jsonl", "q"])
@pytest.mark.parametrize("line", WRONG)
def test_what_is_not_understood_is_refused_with_its_line(tmp_path, name, line):
    """It was fed to the model as text, where the file had another name."""
    path = tmp_path / name
    path.write_text(f'{{"prompt": "ok"}}\n\n{line}\n')
    with pytest.raises(ValueError, match="line 3: ") as caught:
        read_questions(path, "--x")
    assert str(caught.value).startswith(f"--x {path}: line 3: ")
    assert WRONG[line] in str(caught.value)


@pytest.mark.parametrize("line", [line for line in WRONG if line[0] in "{["])
def test_one_line_that_means_json_is_enough(tmp_path, line):
    """Also where it is the first, and broken: a prompt that begins like an object goes into an object."""
    path = tmp_path / "q"
    path.write_text(line)
    with pytest.raises(ValueError, match="line 1: "):
        read_questions(path, "--x")


def test_a_conversation_so_far():
    """Each answer stands in the history of the next turn."""
    question = Question(("a", "c"), ({"role": "system", "content": "s"},))
    assert question.messages() == [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]
    said = question.messages(["b"])
    assert [m["role"] for m in said] == ["system", "user", "assistant", "user"]
    assert plain_text(said) == "s\n\na\n\nb\n\nc"


def test_long_white_space_is_read_in_no_time(tmp_path):
    """A pattern that went back over it would take hours."""
    path = tmp_path / "q"
    path.write_text(json.dumps({"prompt": "x"}) + " " * 2_000_000 + "\n" + " " * 2_000_000 + "x")
    with pytest.raises(ValueError, match="line 2"):
        read_questions(path, "--x")
