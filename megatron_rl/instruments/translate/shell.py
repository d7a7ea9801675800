"""What a launch script would start: its commands with their variables filled in, without running anything.

Understood are assignments, arrays, `${NAME:-default}` and its relatives, arithmetic, `if` with one `[ … ]` or
`[[ … ]]`, and `source` of a file that is there. Loops, `case` and functions are left out. What depends on the machine,
such as `$(command)` or a variable that the script does not set, stays in the text as `unresolved_names` finds it.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path

from megatron_rl.errors import InputError

_OPEN, _CLOSE = "\ue000", "\ue001"  # around what is not known; private characters, which no script holds
_UNKNOWN = re.compile(f"{_OPEN}(.*?){_CLOSE}", re.DOTALL)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_PARAMETER = re.compile(r"(#?)([A-Za-z_]\w*|[@*#?0-9])(\[[^\]]*\])?(.*)", re.DOTALL)
_TESTS = ("[", "[[", "test")
_DECLARING = {"export", "declare", "local", "readonly", "typeset"}
_OPERATORS = ("&&", "||", ";;", ";", "|", "&", "(", ")", "\n")
_PAIRS = {"(": ")", "{": "}"}
_LEFT_OUT = {"for": "done", "while": "done", "until": "done", "case": "esac"}
MAX_EXPANDED = 2**24  # characters that all expansions of a script may give


def unresolved_names(text: str) -> list[str]:
    """Variables and commands whose values ``text`` lacks, as the script writes them."""
    return [_UNKNOWN.sub(r"\1", name) for name in _UNKNOWN.findall(text)]


def readable(text: str) -> str:
    """Return ``text``, with unknown parts as the script writes them."""
    return text.replace(_OPEN, "").replace(_CLOSE, "")


@dataclass
class Script:
    """A script as read. ``commands``: words of each command that would start. ``notes``: what was not followed, and
    why."""

    commands: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class _Array:
    name: str
    is_added: bool
    words: list[str]


_Token = str | _Array


def read_script(path: Path, variables: Mapping[str, str] | None = None) -> Script:
    """Follow the script at ``path``. ``variables``: the environment that it is started in.

    Raises InputError where it is no text, or a quote or bracket is not closed.
    """
    reader = _Reader(dict(variables or {}), path.parent.absolute())
    reader.follow(path)
    return reader.script


def _tokens(text: str, path: Path) -> Iterator[_Token]:
    """Words as they are written, operators, ends of lines, and arrays."""
    at = 0
    while at < len(text):
        if text.startswith("\\\n", at):
            at += 2
        elif text[at] in " \t":
            at += 1
        elif text[at] == "#":
            at = _end_of_line(text, at)
        elif text.startswith("<<", at) and not text.startswith("<<<", at):
            match = re.compile(r"<<-?\s*(['\"]?)(\w+)\1[^\n]*\n").match(text, at)
            end = match and re.compile(rf"^\t*{match[2]}$", re.MULTILINE).search(text, match.end())
            at = end.end() if end else _end_of_line(text, at)
        elif operator := next((op for op in _OPERATORS if text.startswith(op, at)), None):
            at += len(operator)
            yield operator
        else:
            token, at = _word(text, at, path)
            yield token


def _end_of_line(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end


def _word(text: str, start: int, path: Path) -> tuple[_Token, int]:
    """The word or array that begins at ``start``, and where it ends."""
    at = start
    while at < len(text):
        written = text[start:at] if text[at] == "(" else ""
        if re.fullmatch(r"[A-Za-z_]\w*\+?=", written):
            end = closing(text, at, path)
            inside = [token for token in _tokens(text[at + 1 : end], path) if isinstance(token, str) and token != "\n"]
            return _Array(written.rstrip("+="), "+" in written, inside), end + 1
        if text[at] in " \t\n;|()" or (text[at] == "&" and text[max(start, at - 1) : at] != ">"):
            break
        at = after_piece(text, at, path)
    return text[start:at].replace("\\\n", ""), at


def after_piece(text: str, at: int, path: Path) -> int:
    """Where the piece at ``at`` ends: a quoted text, an expansion, or one character."""
    char = text[at]
    if char == "\\":
        return at + 2
    if char == "'":
        end = text.find("'", at + 1)
        return _closed(end, "'", text, at, path) + 1
    if char == '"':
        end = at + 1
        while end < len(text) and text[end] != '"':
            end = after_piece(text, end, path) if text[end] in "\\$`" else end + 1
        return _closed(end if end < len(text) else -1, '"', text, at, path) + 1
    if char == "`":
        return _closed(text.find("`", at + 1), "`", text, at, path) + 1
    if char == "$" and text[at + 1 : at + 2] in _PAIRS:
        return closing(text, at + 1, path) + 1
    return at + 1


def closing(text: str, at: int, path: Path) -> int:
    """Where the bracket at ``at`` is closed."""
    opened, closed, end = text[at], _PAIRS[text[at]], at + 1
    while end < len(text) and text[end] != closed:
        if text[end] == opened:
            end = closing(text, end, path) + 1
        elif text[end] == "#" and opened == "(" and text[end - 1] in " \t\n":
            end = _end_of_line(text, end)
        else:
            end = after_piece(text, end, path)
    return _closed(end if end < len(text) else -1, closed, text, at, path)


def _closed(end: int, mark: str, text: str, at: int, path: Path) -> int:
    if end < 0:
        raise InputError(f"{path}:{text.count(chr(10), 0, at) + 1}: what begins here is not closed with {mark}")
    return end


class _Reader:
    def __init__(self, variables: dict[str, str], folder: Path) -> None:
        self.variables, self.arrays, self.folder = variables, {}, folder
        self.script, self.path, self.depth, self.expanded = Script(), folder, 0, 0

    def follow(self, path: Path) -> None:
        try:
            text = path.read_text(encoding="utf-8").replace("\r\n", "\n")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path}: cannot be read as a script: {error}") from error
        before, self.path = self.path, path
        tokens = list(_tokens(text, path))
        self._run(tokens, 0, len(tokens))
        self.path = before

    # Statements

    def _run(self, tokens: list[_Token], at: int, end: int) -> None:
        while at < end:
            token = tokens[at]
            if token == "if":
                at = self._if(tokens, at, end)
            elif token in _LEFT_OUT:
                after = _matching(tokens, at, end, tuple(_LEFT_OUT), _LEFT_OUT[token])
                if any(isinstance(inner, _Array) or _ASSIGNMENT.match(inner) for inner in tokens[at:after]):
                    self._note(f"`{_line(tokens, at, end)}` was left out")
                at = after
            elif isinstance(token, str) and at + 2 < end and tokens[at + 1 : at + 3] == ["(", ")"]:
                at = _matching(tokens, at, end, ("{",), "}")
                self._note(f"the function {token}() was left out")
            else:
                at = self._list(tokens, at, end)

    def _list(self, tokens: list[_Token], at: int, end: int) -> int:
        """Commands joined by && and || up to the end of their line."""
        last: bool | None = True
        is_run = True
        while at < end:
            start = at
            at = next((i for i in range(at, end) if tokens[i] in (*_OPERATORS, "\n")), end)
            if is_run and at > start:
                last = self._command(tokens[start:at])
            joint = tokens[at] if at < end else "\n"
            at += 1
            if joint in ("\n", ";", ";;", "&"):
                return at
            if joint in ("&&", "||"):
                is_run = last is None or last == (joint == "&&")
                if last is None:
                    self._note(f"whether `{_line(tokens, start, end)}` goes on is not known; taken as if it did")
        return at

    def _command(self, tokens: list[_Token]) -> bool | None:
        """Carry out a command as far as it sets variables; whether it succeeds, None where that is not known."""
        while tokens and tokens[0] in ("{", "}", "then", "do", "!", "time"):
            tokens = tokens[1:]
        if tokens and tokens[0] in _DECLARING:
            tokens = [token for token in tokens[1:] if isinstance(token, _Array) or not token.startswith("-")]
        if not tokens:
            return True
        if tokens[0] in _TESTS:
            return self._test(tokens)
        while tokens and (isinstance(tokens[0], _Array) or _ASSIGNMENT.fullmatch(tokens[0])):
            self._assign(tokens[0])
            tokens = tokens[1:]
        words = [word for token in tokens if isinstance(token, str) for word in self._expand(token)]
        if words and words[0] in ("source", ".") and len(words) > 1:
            self._source(words[1])
        elif words and words[0] not in (":", "set", "true", "unset", "shopt", "cd", "trap", "sleep"):
            self.script.commands.append(words)
        return not words or words[0] != "false"

    def _source(self, written: str) -> None:
        file = self.folder / written
        if unresolved_names(written) or not file.is_file() or self.depth > 4:
            self._note(f"source {readable(written)}: not there, and so what it sets is not known")
            return
        self.depth += 1
        self.follow(file)
        self.depth -= 1

    def _assign(self, token: _Token) -> None:
        if isinstance(token, _Array):
            before = self.arrays.get(token.name, []) if token.is_added else []
            self.arrays[token.name] = before + [word for raw in token.words for word in self._expand(raw)]
            return
        name, plus, raw = _ASSIGNMENT.fullmatch(token).groups()
        before = self.variables.get(name, "") if plus else ""
        self.variables[name] = before + self._expand_to_one(raw)

    def _if(self, tokens: list[_Token], at: int, end: int) -> int:
        after = _matching(tokens, at, end, ("if",), "fi")
        marks = [at, *_own(tokens, at + 1, after - 1, ("elif", "else")), after - 1]
        for start, stop in pairwise(marks):
            if tokens[start] == "else":
                self._run(tokens, start + 1, stop)
                break
            then = next((i for i in _own(tokens, start + 1, stop, ("then",))), stop)
            holds = self._condition(tokens[start + 1 : then])
            if holds is None:
                condition = _written(tokens[start + 1 : then]).strip(" ;\n")
                self._note(f"whether `if {condition}` holds is not known: its branches were left out")
                break
            if holds:
                self._run(tokens, then + 1, stop)
                break
        return after

    def _condition(self, tokens: list[_Token]) -> bool | None:
        """Whether a single test holds; None where that is not known."""
        tokens = [token for token in tokens if token not in ("\n", ";", "{", "}")]
        is_inverted = tokens[:1] == ["!"]
        tokens = tokens[is_inverted:]
        result = self._test(tokens) if tokens and tokens[0] in _TESTS and not {"&&", "||"} & {*tokens} else None
        return None if result is None else result != is_inverted

    def _test(self, tokens: list[_Token]) -> bool | None:
        """Whether `[ … ]`, `[[ … ]]` or `test …` holds; None where that is not known."""
        words = [self._expand_to_one(token) for token in tokens[1:] if token not in ("]", "]]")]
        is_inverted = words[:1] == ["!"]
        result = self._holds(words[is_inverted:])
        return None if result is None else result != is_inverted

    def _holds(self, words: list[str]) -> bool | None:
        if any(unresolved_names(word) for word in words):
            return None
        if len(words) == 1 or (len(words) == 2 and words[0] in ("-n", "-z")):
            return (words[-1] != "") == (words[0] != "-z" or len(words) == 1)
        if len(words) == 3 and words[1] in ("=", "==", "!="):
            return fnmatchcase(words[0], words[2]) == (words[1] != "!=")
        numeric = {f"-{name}": getattr(operator, name) for name in ("eq", "ne", "gt", "ge", "lt", "le")}
        if len(words) == 3 and words[1] in numeric and all(word.lstrip("-").isdigit() for word in words[::2]):
            return numeric[words[1]](int(words[0]), int(words[2]))
        return None

    # Expansion

    def _note(self, text: str) -> None:
        note = f"{self.path.name}: {readable(text)}"
        if note not in self.script.notes:
            self.script.notes.append(note)

    def _expand_to_one(self, raw: _Token) -> str:
        return "".join(text for text, _ in self._pieces(raw)) if isinstance(raw, str) else ""

    def _expand(self, raw: str) -> list[str]:
        """Words that ``raw`` becomes: unquoted blanks of a variable divide it, "${A[@]}" is a word an item."""
        words, current, is_word = [], "", False
        for text, kind in self._pieces(raw):
            if kind == "item":
                words += [current] if is_word else []
                current, is_word = text, True
            elif kind == "split":
                parts = re.split(r"\s+", text)
                current, is_word = current + parts[0], is_word or bool(parts[0])
                for part in parts[1:]:
                    words += [current] if is_word else []
                    current, is_word = part, bool(part)
            else:
                current, is_word = current + text, True
        return [*words, current] if is_word else words

    def _pieces(self, raw: str, is_quoted: bool = False) -> Iterator[tuple[str, str]]:
        """Parts of ``raw`` with how they join: as they are, an item of an array, or to be split at blanks."""
        for piece, kind in self._read_pieces(raw, is_quoted):
            self.expanded += 1 + len(piece)
            if self.expanded > MAX_EXPANDED:
                raise InputError(
                    f"{self.path}: its variables stand for more than {MAX_EXPANDED >> 20} million characters"
                )
            yield piece, kind

    def _read_pieces(self, raw: str, is_quoted: bool) -> Iterator[tuple[str, str]]:
        at = 0
        while at < len(raw):
            is_plain = is_quoted and raw[at] in "'\""
            end = at + 1 if is_plain else after_piece(raw, at, self.path)
            piece, char = raw[at:end], raw[at]
            at = end
            if char == "'" and not is_quoted:
                yield piece[1:-1], ""
            elif char == '"' and not is_quoted:
                if not re.fullmatch(r'"\$(\{\w+\[@\]\}|@)"', piece):  # which may be no word at all
                    yield "", ""
                yield from self._pieces(piece[1:-1], is_quoted=True)
            elif char == "\\":
                is_escape = not is_quoted or piece[1:] in ("$", "`", '"', "\\", "\n")
                yield (piece[1:].replace("\n", "") if is_escape else piece), ""
            elif char == "$" and piece.startswith("$(("):
                yield self._arithmetic(piece[3:-2]), ""
            elif char == "`" or piece.startswith("$("):
                yield self._substitution(piece), ""
            elif piece.startswith("${"):
                yield from self._parameter(piece[2:-1], is_quoted)
            elif char == "$" and (name := re.compile(r"[A-Za-z_]\w*|[@*#?0-9]").match(raw, at)):
                at = name.end()
                yield from self._parameter(name[0], is_quoted)
            else:
                yield piece, ""

    def _substitution(self, written: str) -> str:
        if re.search(r"BASH_SOURCE|dirname[^|]*\$(0|\{0\})", written) and "|" not in written:
            up = written.count("/..")
            return str(self.folder.joinpath(*[".."] * up)) if up else str(self.folder)
        return f"{_OPEN}{readable(written)}{_CLOSE}"

    def _parameter(self, inside: str, is_quoted: bool) -> Iterator[tuple[str, str]]:
        """What `${…}` or `$NAME` stands for. An unknown value with blanks in it is not divided."""
        match = _PARAMETER.fullmatch(inside)
        is_length, name, index, rest = match.groups() if match else ("", "", None, inside)
        value, unknown = self.variables.get(name), f"{_OPEN}${{{inside}}}{_CLOSE}"
        kind = "" if is_quoted or unresolved_names(value or "") else "split"
        default = re.fullmatch(r"(:?)([-=+?])(.*)", rest, re.DOTALL)
        if name in ("@", "*") and not rest:
            return  # arguments of the script: none
        if index in ("[@]", "[*]") or (name in self.arrays and index is None):
            items = self.arrays.get(name)
            if is_length:
                yield str(len(items or [])), ""
            elif items is None:
                yield unknown, ""
            else:
                yield from ((item, "item" if i else "") for i, item in enumerate(items))
        elif is_length or index is not None or not name:
            yield unknown, ""
        elif default:
            is_missing = value is None or (default[1] == ":" and value == "")
            if default[2] == "+" or (is_missing and default[2] in "-="):
                given = self._expand_to_one(default[3])
                if default[2] == "=":
                    self.variables[name] = given
                yield ("" if default[2] == "+" and is_missing else given), kind
            else:
                yield (unknown, "") if is_missing else (value, kind)
        elif value is None:
            yield f"{_OPEN}${{{name}}}{_CLOSE}", ""
        elif not rest:
            yield value, kind
        else:
            yield unknown, ""

    def _arithmetic(self, written: str) -> str:
        text = self._expand_to_one(written)
        for _ in range(8):  # a variable may hold an expression
            text = re.sub(r"[A-Za-z_]\w*", lambda name: f"({self.variables.get(name[0], name[0])})", text)
        try:
            return str(_evaluated(ast.parse(text.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return f"{_OPEN}$(({readable(written)})){_CLOSE}"


_ARITHMETIC = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


def _evaluated(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluated(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return _ARITHMETIC[type(node.op)](_evaluated(node.left), _evaluated(node.right))
    raise ValueError("not an integer expression")


def _matching(tokens: list[_Token], at: int, end: int, openers: tuple[str, ...], closer: str) -> int:
    """The place behind the ``closer`` that belongs to the opener at, or first after, ``at``."""
    depth = 0
    for i in range(at, end):
        if tokens[i] in openers:
            depth += 1
        elif tokens[i] == closer:
            depth -= 1
            if depth == 0:
                return i + 1
    return end


def _own(tokens: list[_Token], at: int, end: int, wanted: tuple[str, ...]) -> Iterator[int]:
    """Places of ``wanted`` in ``tokens`` that belong to no inner `if` or `case`."""
    depth = 0
    for i in range(at, end):
        if tokens[i] in ("if", "case"):
            depth += 1
        elif tokens[i] in ("fi", "esac"):
            depth -= 1
        elif depth == 0 and tokens[i] in wanted:
            yield i


def _line(tokens: list[_Token], at: int, end: int) -> str:
    return _written(tokens[at : next((i for i in range(at, end) if tokens[i] in ("\n", ";", "&&", "||")), end)])


def _written(tokens: list[_Token]) -> str:
    return " ".join(token if isinstance(token, str) else f"{token.name}=(…)" for token in tokens)
