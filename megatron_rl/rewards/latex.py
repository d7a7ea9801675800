r"""Splits an answer, LaTeX or plain text, into tokens and removes everything that only changes its appearance.

Fonts, sizes, colours, spacing and dollar signs give no token. Unicode signs and LaTeX commands for the same sign give
the same token: ``\dfrac{1}{2}``, ``\mathbf{\frac{1}{2}}`` and ``½`` give the same tokens. A token records whether it
was in roman type (``\text``, ``\mathrm``), as units and words are. The time is linear in the length of the answer.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

MAX_TOKENS = 1500
Rules = tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...]


def words(text: str) -> list[str]:
    """The words of a table that is written as one text."""
    return text.split()


def synonyms(table: str) -> dict[str, str]:
    """The meaning of each spelling in ``spelling,spelling→meaning …``."""
    entries = (entry.split("→") for entry in table.split())
    return {spelling: meaning for spellings, meaning in entries for spelling in spellings.split(",")}


def _rules(*rules: tuple[str, str | Callable[[re.Match[str]], str]]) -> Rules:
    return tuple((re.compile(pattern), spelling) for pattern, spelling in rules)


def _rewritten(text: str, rules: Rules) -> str:
    for pattern, spelling in rules:
        text = pattern.sub(spelling, text)
    return text


COMMON_WORDS = frozenset(words(
    "not no yes is are was be the or and of to in on at by if it as an so than then else more less none any all "
    "some true false only for from with mod base over times plus minus half"
))  # fmt: skip
FUNCTIONS = frozenset(words(
    "sin cos tan cot sec csc arcsin arccos arctan arccot arcsec arccsc sinh cosh tanh coth sech csch log ln lg "
    "exp abs floor ceil gcd lcm max min det deg arg Re Im sgn sign asin acos atan cis tg ctg arctg arcctg "
    "arcsinh arccosh arctanh arsinh arcosh artanh"
))  # fmt: skip


class Unread(ValueError):
    """Raised if the answer, or a part of it, is not in the verifier's language."""


@dataclass(frozen=True, slots=True)
class Token:
    r"""``kind``: number (digits, a decimal, ``6.3e-4``, ``0.1(6)``), letters, command (``\frac``) or sign."""

    kind: str
    text: str
    roman: bool = False
    space: bool = False  # whether white space stands before it


_SIGNS = synonyms(
    "−,‐,‑,‒,–,—,―,⁻→- ×,⋅,·,∙,•,∗→* ∕,⁄→/ ∶→: ≤,⩽,≦→<= ≥,⩾,≧→>= ≠→!= º,˚→° ′,’,‘→' “,”→\" 。→. 、→, ∞→infty "
    "∅→emptyset ⟨→langle ⟩→rangle ⌊→lfloor ⌋→rfloor ⌈→lceil ⌉→rceil …→ldots ∧→land ∨→lor ¬→neg ∠→angle △→triangle "
    "µ→mu Ω→Omega ℝ→R ℤ→Z ℕ→N ℚ→Q ℂ→C €→euro £→pounds ¥→yen ₹→rupee"
)
_SIGNS |= {sign: rf"\{name} " for sign, name in _SIGNS.items() if name.isalpha() and name.isascii()}
_SUPERSCRIPT = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿⁱ", "0123456789+-ni"))
_SUBSCRIPT = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋ₙ", "0123456789+-n"))
_INDEX = {"√": "", "∛": "[3]", "∜": "[4]"}
_CHINESE_WORDS = synonyms(
    "平方→square 立方→cubic 公里,千米→km 厘米,公分→cm 毫米→mm 米→m 分米→dm 千克,公斤→kg 克→g 毫克→mg 吨→tonnes 升→L "
    "毫升→mL 小时,时→hours 分钟→minutes 秒→seconds 天,日→days 周,星期→weeks 月,个月→months 年,岁→years "
    "万→myriad 亿→hundredmillion 千→thousand 百→hundred 元,块,块钱,人民币→yuan ¢→cents "
    "度→degrees 人,个人→people 每→per 或,或者→or 和,且,与→and "
    "点→point 个,只,件,张,本,种,次,条,辆,棵,支,枚,颗,位,名→units 是,对,正确→yes 否,不是,错,错误→no "
    "无解,空集,没有解,无实数解→none"
)
_UNICODE = _rules(
    ("|".join(sorted(_CHINESE_WORDS, key=len, reverse=True)), lambda m: rf" \text{{ {_CHINESE_WORDS[m[0]]} }} "),
    (f"[{''.join(_SUPERSCRIPT)}]+", lambda m: "^{" + "".join(map(_SUPERSCRIPT.get, m[0])) + "}"),
    (f"[{''.join(_SUBSCRIPT)}]+", lambda m: "_{" + "".join(map(_SUBSCRIPT.get, m[0])) + "}"),
    (r"([√∛∜])\s*(\d+(?:\.\d+)?|[A-Za-z])?", lambda m: rf"\sqrt{_INDEX[m[1]]}" + (f"{{{m[2]}}}" if m[2] else " ")),
)


def plain_signs(text: str) -> str:
    """``text`` with LaTeX or ASCII in the place of other Unicode: ``x⁴`` → ``x^{4}``, ``½`` → ``\\frac{1}{2}``."""
    if text.isascii():
        return text
    return "".join(char if char.isascii() else _plain_char(char) for char in _rewritten(text, _UNICODE))


def _plain_char(char: str) -> str:
    if char in _SIGNS:
        return _SIGNS[char]
    name = unicodedata.name(char, "").split()
    if name[:1] == ["GREEK"] and len(name) == 4:  # `GREEK SMALL LETTER LAMDA`
        letter = name[3].capitalize() if name[1] == "CAPITAL" else name[3].lower()
        return rf"\{letter.replace('amda', 'ambda')} "
    if unicodedata.category(char) in ("Cf", "Cc", "Mn"):  # zero-width spaces, joiners, marks of direction
        return "" if unicodedata.category(char) != "Mn" else char
    spelled = unicodedata.normalize("NFKC", char)
    top, slash, bottom = spelled.partition("⁄")  # ½ has the compatible spelling 1⁄2
    if slash:
        return rf"\frac{{{top}}}{{{bottom}}}"
    return "".join(_SIGNS.get(part, part) for part in spelled)


# Commands by their effect on tokens. Those of the first group give none.
_LOOKS = words(  # patterns
    "q?quad (?:thin|en|med|thick|nobreak)?space hfill noindent par newline (?:display|text|script(?:script)?)style "
    "(?:no)?limits [bB]igg?[lrm]? tiny (?:script|footnote|normal)size small [lL]arge LARGE [hH]uge bf(?:series)? "
    "(?:it|up|sl|sc)(?:shape)? mdseries (?:sf|tt)(?:family)? em cal frak (?:un)?boldmath (?:math)?strut checkmark "
    "centering operatornamewithlimits math(?:surround|ord|op|bin|rel|open|close) middle left right"
)
_ROMAN = words("text textrm textnormal textup mathrm mathup mbox hbox operatorname textsf mathsf rm rmfamily unit")
_FONTS = words(
    "mathbf textbf boldsymbol bm pmb mathit textit textsl emph mathtt texttt textsc underline uline boxed fbox mathcal "
    "mathscr mathfrak mathnormal symbf symup ensuremath smash mathbb Bbb"
)
_NAMES = synonyms(
    r"dfrac,tfrac,cfrac,sfrac,nicefrac→frac dbinom,tbinom→binom varnothing→emptyset lbrack→[ rbrack→] lbrace→\{ "
    r"rbrace→\} lparen→( rparen→) vert,Vert→| lt→< gt→> le,leq,leqslant,leqq→<= ge,geq,geqslant,geqq→>= ne,neq→!= "
    r"approx,simeq→≈ equiv→≡ in→∈ notin→∉ cup,bigcup→∪ cap,bigcap→∩ setminus,smallsetminus,backslash,textbackslash→∖ "
    r"pm→± mp→∓ times,cdot,ast,bullet→* div→÷ circ,degree,textdegree→° prime→' mid→∣ colon→: percent→% lor,vee→or "
    r"land,wedge→and dots,cdots,dotsc,dotsb→ldots infin→infty reals→R varepsilon→epsilon vartheta→theta varphi→phi "
    r"slash→/ texteuro→euro textsterling→pounds textdollar→$ overrightarrow→vec widehat→hat widetilde→tilde "
    r"bar→overline"
)
_LETTERS = {"imath": "i", "AA": "Å", "ell": "ℓ", "jmath": "j", "Pr": "P", "P": "P", "E": "E"}
_CONNECTIVES = ("or", "and")
_SPELLED = {r"\|": "|", r"\$": "$", r"\%": "%", r"\#": "#", r"\&": ",", r"\_": "_", "**": "^", "==": "="}

_TOKEN = re.compile(
    rf"(?P<skip>\\[,;:>!()\[\]\s]|\\\Z|[\s~]+|\$|\\(?:{'|'.join(_LOOKS)})(?![A-Za-z])\*?)"
    rf"|\\(?P<font>{'|'.join([*_ROMAN, *_FONTS])})(?![A-Za-z])\*?(?:\s*\{{)?"
    r"|(?P<row>\\\\(?:\s*\[\s*-?[\d.]+\s*(?:pt|ex|em|mm|cm|in)\s*\])?)"
    r"|\\(?P<command>[A-Za-z]+)\*?"
    r"|(?P<escaped>\\[{}|$%#&_])"
    r"|(?P<number>\d*\.\d*\(\d+\)(?![\w^])|(?:\d+(?:\.\d*)?|\.\d+)[eE][+-]?\d+(?![\w.^])|\d+(?:\.\d+)?|\.\d+)"
    r"|(?P<letters>[^\W\d_]+)"
    r"|(?P<sign><=|>=|!=|==|\*\*|.)",
    re.DOTALL,
)
_PERIOD = re.compile(r"(\d)\1+$|(\d{2,12}?)\2{2,}$|^(\d{2,12}?)\3+$")  # of `0.1666...`
_TAKES_ARGUMENT = {"^", "_", r"\frac", r"\sqrt", r"\binom"}

# Numbers in words: ``twenty-five``, ``one hundred and five``, ``two thirds``.
_ONES = words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_TENS = words("twenty thirty forty fifty sixty seventy eighty ninety")
_VALUES = dict(zip(_ONES, range(20))) | dict(zip(_TENS, range(20, 100, 10)))
_PARTS = {"half": 2, "halves": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7,
          "eighth": 8, "ninth": 9, "tenth": 10}  # fmt: skip
_TO_99 = rf"(?:(?:{'|'.join(_TENS)})(?:[ -](?:{'|'.join(_ONES[1:10])}))?|{'|'.join(reversed(_ONES))})"
_TO_999 = rf"(?:(?:{'|'.join(_ONES[1:10])}) hundred(?:(?: and)? {_TO_99})?|{_TO_99})"
_IN_WORDS = (
    rf"(?i)(?<![\\A-Za-z])(?P<number>{_TO_999}(?: thousand(?:,?(?: and)? {_TO_999})?)?"
    rf"(?:[ -](?:{'|'.join(_PARTS)})s?)?)(?: and (?:a|one) (?P<rest>half|third|quarter))?(?![A-Za-z])"
)


def _in_digits(match: re.Match[str]) -> str:
    total = value = 0
    parts = []
    for word in re.findall("[a-z]+", match["number"].lower()):
        name = word if word in _PARTS else word.removesuffix("s")
        if name in _PARTS:
            parts = [f"/{_PARTS[name]}"]
        elif word == "thousand":
            total, value = value * 1000, 0
        else:
            value = value * 100 if word == "hundred" else value + _VALUES.get(word, 0)
    return f"{total + value}" + "".join(parts or ([f" 1/{_PARTS[match['rest'].lower()]}"] if match["rest"] else []))


def _periodic(match: re.Match[str]) -> str:
    """``0.1666\\ldots`` as ``0.1(6)``."""
    whole, _, places = match[1].partition(".")
    period = _PERIOD.search(places[-60:])
    if period is None:
        return match[1]
    return f"{whole}.{places[: len(places) - len(period[0])]}({next(filter(None, period.groups()))})"


_SIGN = re.compile(r"[\\^{!._U∈]")  # without any of these no rule of `_REWRITTEN` applies
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z][A-Za-z.]")  # not a command
_TEXT = r"\s*(?:\\text\s*\{)?\s*"
_UPRIGHT = r"(?:\\(?:mathrm|text)\s*\{)?"


_REWRITTEN = _rules(
    (r"\^\s*(\{\s*)?((?:[°']|\\(?:circ|degree|prime)(?![A-Za-z])\s*)+)(?(1)\})", r"\2 "),
    (r"\\(l|r)(?:eft|ight)\s*(?:\||\\[lr]?vert(?![A-Za-z]))", r"\\\1vert "),
    (r"\\left\s*\\\{\s*\\begin\s*\{(?:array\}\s*\{[^{}]*|aligned|matrix)\}", r"\\begin{cases}"),
    (r"\\end\s*\{(?:array|aligned|matrix)\}\s*\\right\s*\.", r"\\end{cases}"),
    (r"\\(?:left|right)\s*\.", ""),
    (r"\\(l|r)(?:eft\s*<|ight\s*>)", r"\\\1angle "),
    (r"\b([fgh])\s*\^\s*\{?\s*-\s*1\s*\}?\s*(?=(?:\\left)?\s*\()", r"\1_{inverse}"),
    (r"(?<!and\})(?<!or\})(?<=[\w)}])\s*\\q?quad\s*(?=[A-Za-z]\s*=)", ","),
    (r"\\not\s*(=|\\in(?![A-Za-z]))", lambda match: r"\ne " if match[1] == "=" else r"\notin "),
    (r"(?<=[\d)}])!=", "! ="),  # `5!=120`
    (r"\.\.\.", r"\\ldots "),
    (r"(\d*\.\d+)\s*\\[lc]?dots(?![A-Za-z])", _periodic),
    (r"((?:\d+(?:,\d{3})*)?\.\d*)\s*(?:\\(?:overline|bar)\s*(?:\{\s*(\d+)\s*\}|(\d))"
     r"|\\dot\s*\{?\s*(\d)\s*\}?(?:(\d*)\\dot\s*\{?\s*(\d)\s*\}?)?(?!\d))",
     lambda match: f"{match[1].replace(',', '')}({''.join(filter(None, match.groups()[1:]))})"),
    (r"\\(?:[hv]space|[hv]?phantom|label|(?:text)?color|colorbox)\*?\s*(?:\[[^\[\]]*\])?\s*\{[^{}]*\}"
     r"|\\(?:hskip|m?kern)\s*-?[\d.]+\s*(?:pt|em|ex|mu|cm|mm)", " "),
    (r"\\(?:mathbb|Bbb)\s*\{?\s*([A-Z])\s*\}?", r"\\\1 "),
    (r"(?<=\d)(?:\{,\}|,\s*\\!)\s*(?=\d{3})", ""),
    (r"\{:\}", ":"),
    (r"(?<=\d)\s*[xX]\s*(?=10\s*\^)", "*"),
    (r"(?<=[\])])\s*U\s*(?=[\[(])", r"\\cup "),
    (r"(\\in|∈)\s*([NZQR])(?![A-Za-z]|_\w)", r"\1\\\2 "),
    (r"(?<=[NZQR])\s*([*+])(?=\s*(?:[),}$]|\\right|$))", r"^\1"),  # `N*`
    (r"(?:,|\s|\\q?quad|\\[ ,;])*(?:\\left)?\(\s*([a-z]\s*(?:\\in|∈|(?<=[\d)}\s]\([a-z])(?:[<>]=?|\\[gln]eq?))(?![a-z])"
     r"[^()]*?)(?:\\right)?\)\s*\$?$", r", \1"),
    (r"([A-Za-z]\}?)\^(\d|\{\w+\})_(\w|\{\w+\})", r"\1_\3^\2"),
    (rf"(?:\{{\s*\}}|(?<![\w}}]))[\^_]\{{?(\d+)\}}?\s*{_UPRIGHT}([CAP])\}}?_\{{?(\d+)\}}?", r"\2_{\1}^{\3}"),  # `^5C_2`
    (rf"{_UPRIGHT}C\}}?_\{{?(\d+|n)\}}?\^\{{?(\d+)\}}?", r"\\binom{\1}{\2}"),
    (rf"{_UPRIGHT}[AP]\}}?_\{{?(\d+|n)\}}?\^\{{?(\d+)\}}?", r"\\frac{\1!}{(\1-\2)!}"),
)  # fmt: skip
_REWRITTEN_WORDS = _rules(  # after these; they change nothing in a text without words
    (r"(?<=\d)(?:[\s~]|\\[ ,;:]|\\q?quad)*(\\(?:text|mathrm)\s*\{[\s~]*)?"
     r"(?:([aA])|[pP])\.?\s?[mM](?![A-Za-z])\.?(?(1)\s*\})", lambda match: "㏂" if match[2] else "㏘"),
    (r"(?:12(?::00)?\s*)?(\\text\s*\{\s*)?(?<![A-Za-z:\\])(?:(noon)|midnight)\b(?(1)\s*\})",
     lambda match: "12:00㏘" if match[2] else "12:00㏂"),
    (r"(?<![\\A-Za-z])a (?=(?:half|third|quarter|dozen|hundred|thousand)\b)", "one "),
    (r"\bin total\b|\ba total of\b", ""),
    (_IN_WORDS, _in_digits),
    (r"(?i)(?<![\\A-Za-z])(?:negative|minus)(?=[\s}]*[\d\\(])", "-"),
    (rf"(?<=\d){_TEXT}(?:in|out of)\s*\}}?\s*(?=\d)", "/"),  # `1 in 6`
    (rf"(?<=[\d}}]){_TEXT}to\s*\}}?\s*(?=[\d\\])", ":"),
    (r"(?<![\\A-Za-z])(?:(at least|no (?:less|fewer) than|(?:greater|more) than or equal to)"
     r"|(at most|no (?:more|greater) than|(?:less|fewer) than or equal to)|((?:more|greater|larger) than)"
     r"|((?:less|fewer|smaller) than))\b", lambda match: (r"\ge ", r"\le ", ">", "<")[match.lastindex - 1]),
    (rf"\b(\d+){_TEXT}or (?:(more|greater|larger)|less|fewer)\b",
     lambda match: rf"\{'ge' if match[2] else 'le'} {match[1]}"),
    (r"^(?:\\text\s*\{\s*)?(?:the set of )?(?:all|every|any) (?:real )?numbers?(?: x)?,? "
     r"(?:except|other than|but|excluding)(?: for)?(\s*\})?\s*(?:x\s*=)?(.*?)(?(1)|\}?)\.?$", r"\\R\\setminus\\{\2\\}"),
    (rf",?\s*\(?{_TEXT}(?:(?:where|for|with) (?:any |all |every |each )?integers?\s*\}}?\s*\$?([a-z])\$?"
     rf"|(?:where|for|with)?\s*\}}?\s*\$?\b([a-z])\$?{_TEXT}(?:is |being )?(?:an |any )integer\s*\}}?)\s*\)?$",
     lambda match: rf", {match[1] or match[2]}\in\Z "),
    (r"^(\\text\s*\{)?[A-Za-z][A-Za-z' ]*?\b(?:is|are|equals|numbers?|:)\s*(\})?\s*(?=[-\d$(\[<>]|\\(?!text))",
     lambda match: (match[1] or "") + (match[2] or "")),  # `The slope is -2`, `all real numbers > 2`
)  # fmt: skip

# Words and signs that say nothing, in front of an answer and behind it; `about 6` is not 6, `about 12.6` is 12.6.
_VAGUE = ("about", "approximately", "roughly", "approx")
_BEFORE = frozenset((*_VAGUE, *words(
    r"≈ = : exactly precisely just final answer ans is option choice result point \therefore \implies \rightarrow "
    r"\Rightarrow \to \sim"
)))  # fmt: skip
_BEHIND = frozenset([*".,;:", r"\\", "only", "exactly", "inclusive"])


@lru_cache(maxsize=8)  # `spelling` and `readings` begin with the same tokens
def tokenize(text: str) -> tuple[Token, ...]:
    """Return the tokens of ``text`` without its layout. Raises `Unread`."""
    text = plain_signs(text)
    text = _rewritten(text, _REWRITTEN) if _SIGN.search(text) else text
    text = _rewritten(text, _REWRITTEN_WORDS) if _WORD.search(text) else text
    tokens = _Lexer().tokens(text)
    while tokens:
        last = tokens[-1]
        if last.text in _BEHIND or (last.text == "!" and last.space):
            tokens.pop()
        elif tokens[tokens[0].text.lower() == "the" and len(tokens) > 2].text.lower() in _BEFORE and (
            tokens[0].kind == "sign"
            or (len(tokens) > 1 and not (tokens[0].text in _VAGUE and tokens[1].text.isdigit()))
        ):
            tokens = tokens[1:]
        else:
            break
    return tuple(tokens)


class _Lexer:
    """Reads tokens. ``_groups``: of each open brace the type before it, and the sign that its end gives."""

    def __init__(self) -> None:
        self._space = self._roman = False
        self._groups: list[tuple[bool, str]] = []
        self._out: list[Token] = []

    def tokens(self, text: str) -> list[Token]:
        position = 0
        while position < len(text):
            match = _TOKEN.match(text, position)
            assert match is not None, "the last branch takes any character"
            position = match.end()
            kind, part = match.lastgroup, match[0]
            if kind == "skip":
                self._space |= part not in (r"\!", "$")
            elif kind == "font":
                self._font(match["font"], part.endswith("{"))
            elif part == "{":
                self._emit("sign", "{")
                self._groups.append((self._roman, "}"))
            elif part == "}":
                if not self._groups:
                    raise Unread("a brace is closed that was not opened")
                self._roman, part = self._groups.pop()
                self._emit("sign", part)
            elif kind == "command":
                self._emit(*_command(match["command"]))
            else:
                self._emit(kind, r"\\" if kind == "row" else _SPELLED.get(part, part))
            if len(self._out) > MAX_TOKENS:
                raise Unread("too many tokens")
        return self._out

    def _emit(self, kind: str, text: str) -> None:
        if text:
            self._out.append(
                Token(kind if kind in ("number", "letters", "command") else "sign", text, self._roman, self._space)
            )
            self._space = False

    def _font(self, name: str, opens: bool) -> None:
        """A command that changes only the type of what follows; its braces are kept where an argument is due."""
        if opens:
            kept = bool(self._out) and self._out[-1].text in _TAKES_ARGUMENT
            self._emit("sign", "{" * kept)
            self._groups.append((self._roman, "}" * kept))
            self._roman = name in _ROMAN
        elif name.startswith("rm"):
            self._roman = True


def _command(name: str) -> tuple[str, str]:
    """Kind and text of the token of a command."""
    if name in _LETTERS:
        return "letters", _LETTERS[name]
    plain = _NAMES.get(name, name)
    is_sign = plain in _CONNECTIVES or not (plain.isalpha() and plain.isascii())
    return ("sign", plain) if is_sign else ("command", rf"\{plain}")


def join_thousands(tokens: tuple[Token, ...], at_top: bool) -> tuple[Token, ...]:
    """Join ``1,234`` and ``1 234`` to one number.

    Inside round, square and set brackets, commas separate items; outside all brackets they do so unless ``at_top``.
    """
    joined: list[Token] = []
    brackets: list[str] = []
    head = None  # place of a number that may go on
    for token in tokens:
        if token.text in ("(", "[", r"\{", "{"):
            brackets.append(token.text)
        elif token.text in (")", "]", r"\}", "}") and brackets:
            brackets.pop()
        whole, point, _ = token.text.partition(".")
        commas = brackets[-1] == "{" if brackets else at_top
        is_comma = commas and bool(joined) and joined[-1].text == "," and not joined[-1].space
        goes_on = head is not None and head == len(joined) - 1 - is_comma and token.space != is_comma
        if goes_on and token.kind == "number" and len(whole) == 3 and whole.isdigit():
            joined[head:] = [replace(joined[head], text=joined[head].text + token.text)]
            head = None if point else head
            continue
        if token.kind == "number" and token.text.isdigit() and len(token.text) <= 3 and token.text[0] != "0":
            head = len(joined)
        joined.append(token)
    return tuple(joined)
