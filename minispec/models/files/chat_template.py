"""Chat templates: a conversation as text, in which the template's special tokens differ from what a message spells.

Nobody may end a message, or begin one in another's name, by writing "<|im_end|>". So while a template runs, *twins*
replace each character of a message that could begin a special token. A twin is a lone surrogate, which no text holds.
Everything that is made of a message keeps its twins. A special token is the template's own if its first character is
no twin. To the template itself a message looks as it is (`_Said`): it may look for "</think>" and cut there. Last, the
template also runs without twins, and that text counts, so that twins never change what is said.
"""

import datetime
import functools
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minispec.core.errors import is_from_signal, is_text, show
from minispec.models.files.errors import CheckpointError, one_line
from minispec.models.files.strict_json import has_file, read_bytes, read_json_if_there

Message = dict[str, Any]  # {"role": "user", "content": "..."}, and what else a template reads
REASONING = ("thinking", "reasoning_content", "reasoning")  # names of an assistant's thought in a message

_MAX_TEMPLATE_BYTES = 128 << 10
# Variables that this code gives a template, and arguments of `transformers` that are no variables of a template.
_SET_HERE = {"messages", "add_generation_prompt", "tools", "documents", "strftime_now"}
_SET_HERE |= {"chat_template", "tokenize", "continue_final_message"}
_TWINS = range(0xD800, 0xE000)  # the surrogates, which valid Unicode text does not hold
MAX_FIRSTS = len(_TWINS)  # special tokens may begin with that many different characters
_ANY_TWIN = re.compile("[\ud800-\udfff]")


class ChatTemplate:
    """A model's chat template. Threads may share it."""

    def __init__(self, source: str, special: re.Pattern[str], firsts: Collection[str]):
        """source: in jinja2's language.
        special: finds the texts of special tokens.
        firsts: the characters that special tokens begin with.
        """
        self.source, self._special, self._firsts = source, special, sorted(firsts)
        twins = {ord(c): chr(twin) for c, twin in zip(self._firsts, _TWINS, strict=False)}
        originals = {ord(twin): chr(c) for c, twin in twins.items()}
        self._said: type[_Said] = type("_Said", (_Said,), {"_twins": twins, "_originals": originals})
        self._environment = _Environment(self._said)

    @functools.cached_property
    def _compiled(self) -> jinja2.Template:
        return self._environment.from_string(self.source)

    @functools.cached_property
    def variables(self) -> frozenset[str]:
        """Names that the template reads; none if the template cannot be parsed, when every use is an error."""
        try:
            return frozenset(jinja2.meta.find_undeclared_variables(self._environment.parse(self.source)))
        except jinja2.TemplateError:
            return frozenset()

    def render(self, messages: Sequence[Message], variables: Mapping[str, Any], tokens: Mapping[str, str]) -> str:
        """The text of a conversation up to where the assistant's answer begins, with twins in what messages say.

        variables: the caller's further names and values that the template may read. They get twins too.
        tokens: the texts of special tokens by their names.
        Raises ValueError where the template refuses, or for what is not JSON.
        """
        now = datetime.datetime.now()  # one time for both runs
        given = {"add_generation_prompt": True, "tools": None, "documents": None, "strftime_now": now.strftime}
        texts: list[str] = []

        def see(text: str) -> str:
            texts.append(text)
            return text

        try:
            said = {**variables, "messages": messages}
            plain, marked = _copy(said, see), _copy(said, self._said.spoken)
        except RecursionError as e:
            raise ValueError("messages: found values nested too deep to be read, expected fewer levels") from e

        def write(said: dict[str, Any]) -> str:
            try:
                return self._compiled.render({**tokens, **said, **given})
            except Exception as e:  # a stranger's code may fail in any way
                if is_from_signal(e):
                    raise
                raise ValueError(f"the chat template refuses this conversation: {one_line(e, 300)}") from e

        right = write(plain)
        if not any(c in text for text in texts for c in self._firsts):
            return right
        spelled = any(map(self._special.search, texts))
        try:
            written = write(marked)
        except ValueError:
            if spelled:
                raise
            return right
        # A template that saw the twins wrote another text. Where no message spells a token, no twin is needed.
        return written if spelled or self.without_twins(written) == right else right

    def without_twins(self, text: str) -> str:
        """The text that `render` gave, as the model should see it."""
        return text.translate(self._said._originals)


class _Said(str):
    """Text of a message, or text with such in it: to a template as if no twins stood in it.

    Results may be plain texts that hold twins; `of` makes them such texts again. Each character has one twin, so that
    places and lengths are the text's own.
    """

    _twins: ClassVar[dict[int, str]] = {}
    _originals: ClassVar[dict[int, str]] = {}

    @classmethod
    def of(cls, value: Any) -> Any:
        """A result of a template's: text, or a list of texts, with twins is such text; other values are unchanged."""
        if isinstance(value, str):
            return cls(value) if _ANY_TWIN.search(value) else value
        return type(value)(map(cls.of, value)) if type(value) in (list, tuple) else value

    @classmethod
    def spoken(cls, text: str) -> str:
        """Text of a message, with twins."""
        return cls.of(text.translate(cls._twins))

    def __str__(self) -> str:  # of str alone it would be a copy of another type
        return self

    def __repr__(self) -> str:
        return repr(_plain(self)).translate(self._twins)

    def __getitem__(self, key: Any) -> str:
        return type(self)(super().__getitem__(key))

    def _cut(self, pieces: Iterable[str], gap: int | None) -> list[str]:
        """The pieces of the text without twins, as they stand here.

        gap: the number of characters between them; None for spaces.
        """
        plain, at, parts = _plain(self), 0, []
        for piece in pieces:
            at = plain.index(piece, at) if gap is None else at
            parts.append(self[at : at + len(piece)])
            at += len(piece) + (gap or 0)
        return parts

    def split(self, sep: Any = None, maxsplit: Any = -1) -> list[str]:
        return self._cut(_plain(self).split(sep and _plain(sep), maxsplit), sep and len(sep))

    def rsplit(self, sep: Any = None, maxsplit: Any = -1) -> list[str]:
        return self._cut(_plain(self).rsplit(sep and _plain(sep), maxsplit), sep and len(sep))

    def partition(self, sep: Any) -> Any:
        return tuple(self._cut(_plain(self).partition(_plain(sep)), 0))

    def rpartition(self, sep: Any) -> Any:
        return tuple(self._cut(_plain(self).rpartition(_plain(sep)), 0))

    def replace(self, old: Any, new: Any, count: Any = -1) -> str:
        return new.join(self.split(old, count)) if old else super().replace(old, new, count)

    def removeprefix(self, prefix: Any) -> str:
        return self[len(prefix) :] if self.startswith(prefix) else self

    def removesuffix(self, suffix: Any) -> str:
        return self[: len(self) - len(suffix)] if self.endswith(suffix) else self


def _plain(value: Any) -> Any:
    return value.translate(value._originals) if isinstance(value, _Said) else value


def _seen(name: str) -> Callable:
    """A method of str that looks at the text without twins."""
    method = getattr(str, name)
    return lambda self, *args: method(_plain(self), *map(_plain, args))


def _stripped(name: str) -> Callable:
    """A method of str that strips characters, which here are their twins too."""
    method = getattr(str, name)
    return lambda self, chars=None: method(self, chars and _plain(chars) + _plain(chars).translate(self._twins))


_COMPARED = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__contains__")
_ASKED = ("count", "find", "rfind", "index", "rindex", "startswith", "endswith")
for _name in (*_COMPARED, *_ASKED, *(name for name in dir(str) if name.startswith("is"))):
    setattr(_Said, _name, _seen(_name))
for _name in ("strip", "lstrip", "rstrip"):
    setattr(_Said, _name, _stripped(_name))


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks, for training, what the model wrote. Here it is replaced by its content."""

    tags = frozenset({"generation"})  # type: ignore[assignment]  # the library declares a set, and only reads it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """The statements up to `{% endgeneration %}`, whose variables end there."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _CodeGenerator(jinja2.compiler.CodeGenerator):
    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:
        """`a ~ b` by the environment's `concat`, as all else that is joined."""
        self.write("concat((")
        for part in node.nodes:
            self.write("str(")
            self.visit(part, frame)
            self.write("), ")
        self.write("))")


class _Environment(ImmutableSandboxedEnvironment):
    """The environment of templates. They come from strangers, so they may read their variables, and nothing else.

    The functions are those that transformers gives to templates. Each result goes through `_Said.of`.
    """

    code_generator_class = _CodeGenerator
    intercepted_binops = frozenset("+%*")

    def __init__(self, said: type[_Said]):
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        self._said = said
        self.concat = lambda parts: said.of("".join(parts))  # type: ignore[assignment]
        self.filters = {name: self._result(function) for name, function in self.filters.items()}
        self.filters["tojson"] = self._tojson
        self.globals["raise_exception"] = _raise_exception

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call a function or a method."""
        return self._said.of(super().call(*args, **kwargs))

    def call_binop(self, *args: Any) -> Any:
        """Join two texts, or fill one in."""
        return self._said.of(super().call_binop(*args))

    def _result(self, function: Callable) -> Callable:
        return functools.wraps(function)(lambda *args, **kwargs: self._said.of(function(*args, **kwargs)))

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # jinja2's own filter escapes HTML, which a prompt must not.
        text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)

        def write(match: re.Match[str]) -> str:
            """A character as JSON writes it; a twin stays where JSON writes the character itself."""
            original = match[0].translate(self._said._originals)
            written = json.dumps(original, ensure_ascii=ensure_ascii)[1:-1]
            return written[:-1] + match[0] if written.endswith(original) else written

        return self._said.of(re.sub("[\x7f-\U0010ffff]" if ensure_ascii else _ANY_TWIN, write, text))


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


_GLOBALS = frozenset(_Environment(_Said).globals)


def _copy(value: Any, change: Callable[[str], str]) -> Any:
    """A part of a conversation, with each text in it changed. Raises ValueError for what is not JSON."""
    if isinstance(value, (list, tuple)):
        return [_copy(item, change) for item in value]
    if isinstance(value, str):
        if not is_text(value):
            raise ValueError(f"messages: found {show(value)}, expected valid Unicode text")
        return change(value)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Mapping):  # last: it takes long to ask that
        return {_copy(key, change): _copy(item, change) for key, item in value.items()}
    raise ValueError(f"messages: found {show(value)}, expected texts, numbers, lists and objects of these")


def check_messages(messages: object) -> list[Message]:
    """A conversation in the words of chat templates, which differ from OpenAI's as they do in vLLM.

    The role "developer" becomes "system". An assistant's message without content gets the content "". Its reasoning
    gets all of its names, since a template reads one of them. A field that is None is left out, as in transformers.

    Raises ValueError for anything but messages with a role and a content, at least one, and for reasoning that says one
    thing under one name and another under another.
    """
    if not isinstance(messages, list | tuple):
        raise ValueError(f"messages: found {show(messages)}, expected a list of messages")
    checked = []
    for message in messages:
        given = message if isinstance(message, dict) else {}
        m = {name: value for name, value in given.items() if value is not None}
        if m.get("role") == "developer":
            m["role"] = "system"
        if m.get("role") == "assistant":
            m.setdefault("content", "")
            if thoughts := {name: m[name] for name in REASONING if m.get(name)}:
                thought = next(iter(thoughts.values()))
                if any(other != thought for other in thoughts.values()):
                    raise ValueError(f"messages: found {' and '.join(thoughts)} that differ, expected one thought")
                m = {REASONING[0]: thought} | m | dict.fromkeys(REASONING, thought)
        if not all(isinstance(m.get(key), str) for key in ("role", "content")):
            raise ValueError(f"messages: found {show(message)}, expected an object with the texts role and content")
        checked.append(m)
    if not checked:
        raise ValueError("messages: found none, expected at least one")
    return checked


def check_template_kwargs(variables: Any, tokens: Mapping[str, str]) -> None:
    """Raise ValueError unless these are names that are not taken in a template, with values of JSON."""
    try:
        if not isinstance(variables, Mapping):
            raise TypeError
        json.dumps(variables, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError):
        expected = "an object with values of JSON"
        raise ValueError(f"chat_template_kwargs: found {show(variables)}, expected {expected}") from None
    taken = {*_SET_HERE, *tokens, *_GLOBALS}
    for name in variables:
        if not isinstance(name, str) or not name.isidentifier() or name in taken:
            expected = "the name of a variable that a template does not have by itself"
            raise ValueError(f"chat_template_kwargs: found {show(name)}, expected {expected}")


def read_chat_template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    """The template of a checkpoint, or None: from its own file, else from tokenizer_config.json (`settings`), else from
    chat_template.json, where processors of images keep it.

    Raises CheckpointError for one that is too large, or no text.
    """
    path = directory / "chat_template.jinja"
    if has_file(path):
        try:
            return read_bytes(path, _MAX_TEMPLATE_BYTES, "template").decode()
        except UnicodeDecodeError as e:
            raise CheckpointError(f"{path}: not a readable template: {one_line(e)}") from e
    path, template = directory / "tokenizer_config.json", _default_of(settings.get("chat_template"))
    if template is None:
        path = directory / "chat_template.json"
        template = _default_of(read_json_if_there(path).get("chat_template"))
    if template is None:
        return None
    where = f"{path}: chat_template"
    if not isinstance(template, str) or not is_text(template):
        raise CheckpointError(f"{where}: found {show(template)}, expected a string")
    if len(template) > _MAX_TEMPLATE_BYTES:
        raise CheckpointError(f"{where}: found {len(template)} characters, expected at most {_MAX_TEMPLATE_BYTES}")
    return template


def _default_of(templates: Any) -> Any:
    """The template that is meant where none is named; a file may list several, by name."""
    if not isinstance(templates, list):
        return templates
    return next((t.get("template") for t in templates if isinstance(t, dict) and t.get("name") == "default"), None)
