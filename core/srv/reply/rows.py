"""What a row of the tables of reply formats says. A format is data; the parser has no code of any model.

A reply with calls is, in the order in which a model writes it (what a format lacks is left out):

    text  section.begin  call.begin  BODY  call.end  call.begin  BODY  call.end  section.end

and each `Body` below is one way to write a name and its arguments. A marker is given in all the forms that models
write. White space next to a marker belongs to it.
"""

from __future__ import annotations

from typing import NamedTuple

Markers = tuple[str, ...]


class Marks(NamedTuple):
    """The markers around something, each in one or several forms. Without `end`, the next marker or the end of the
    reply ends it."""

    begin: Markers
    end: Markers = ()


class JsonBody(NamedTuple):
    """`{"name": N, "arguments": {..}}`, or a list of such objects.

    The names of the members are given in all spellings. `separators` stand between objects outside a list. keyed: an
    object is `{N: {..}}` instead.
    """

    names: Markers = ("name",)
    arguments: Markers = ("arguments", "parameters")
    separators: Markers = ()
    keyed: bool = False


class HeaderBody(NamedTuple):
    """`HEADER separator {..}`: the name stands before the arguments, which are JSON.

    header: a regular expression for the text before the separator, with the group `name`, and possibly `id` for the
    call's own id. suffix: what follows the arguments. stays: what may follow the header instead of a separator, and
    belongs to the arguments.
    """

    separator: Markers
    header: str = r"(?P<name>[^\s<>{}\[\]]+)"
    suffix: Markers = ()
    stays: Markers = ()


class TaggedBody(NamedTuple):
    """Tags around the name and around each argument, whose values are text that the tool's schema gives a type:

        name[0] N name[1]  key[0] K key[1]  value V end  ...  close

    name: the second is several forms, of which those in `stays` are only looked at. raw, json: what the second tag of
    the key begins with if the value is a string or JSON, for formats that say so. cut: what ends a value whose `end` is
    missing. newline: whether one newline at each end of a value belongs to the tags. attributes: what ends a name or a
    key behind which its tag has attributes. nested: a value that is an object or an array consists of such arguments in
    turn, those of an array with the key `item`; `end` has the key as {key}. gap: white space that a model writes before
    the tags of arguments and values.
    """

    name: tuple[str, Markers]
    key: tuple[str, str]
    end: str
    value: str = ""
    close: Markers = ()
    stays: Markers = ()
    raw: str = ""
    json: str = ""
    cut: Markers = ()
    newline: bool = True
    attributes: str = ""
    nested: bool = False
    gap: str = ""


class PythonBody(NamedTuple):
    """`f(a=1, b="x")` with literals of Python or JSON as values.

    brackets: around a list of calls separated by commas; "": calls follow one another.
    """

    brackets: str = "[]"


class BareBody(NamedTuple):
    """`call:N{K:V, ..}`: JSON whose keys have no quotes and whose strings stand between two `quote`."""

    quote: str
    begin: str = "call:"


Body = JsonBody | HeaderBody | TaggedBody | PythonBody | BareBody


class ToolFormat(NamedTuple):
    """How a family of models writes tool calls.

    `name`: as `--tool-call-parser` takes it; `aliases`: names of the same format in other servers.
    `bodies`: the ways to write a call. The first that fits the text after the markers is used.
    `unmarked`: a reply may begin with a call without any marker, of a tool that the request declares.
    `bare`: how a body begins whose markers a model may leave out; in an `unmarked` format, behind white space.
    `ambiguous`: markers that text has as well, so that only a tool that the request declares is called behind them.
    `ids`: of calls: "call" (`call_` and 24 hexadecimal digits), "short" (9 letters and digits), or a format string of
    `name` and `index`, the position of the call in the conversation.
    `templates`: the format of a model whose chat template contains all strings of one of these.
    `frame`: the text before and after the arguments of a call of the tool {name}, for calls that a grammar forces; the
    arguments are those of the first `TaggedBody`, `PythonBody` or `BareBody`, or JSON.
    `trigger`: the beginning of that text which nothing but a call has.
    `one_call`: a grammar forces one call, because `frame` ends all calls.
    """

    name: str
    aliases: tuple[str, ...] = ()
    section: Marks | None = None
    call: Marks | None = None
    bodies: tuple[Body, ...] = (JsonBody(),)
    unmarked: bool = False
    bare: Markers = ()
    ambiguous: Markers = ()
    ids: str = "call"
    templates: tuple[tuple[str, ...], ...] = ()
    frame: tuple[str, str] = ("", "")
    trigger: str = ""
    one_call: bool = False

    @property
    def markers(self) -> Markers:
        """Everything that must not be lost when special tokens are skipped."""
        around = [mark for marks in (self.section, self.call) if marks for group in marks for mark in group]
        inside = [text for body in self.bodies for field in body for text in _texts(field)]
        return tuple(dict.fromkeys([*around, *inside]))


def _texts(field: object) -> list[str]:
    if isinstance(field, str):
        return [field.strip()] if field.strip() else []
    return [text for part in field for text in _texts(part)] if isinstance(field, tuple) else []


class ReasoningFormat(NamedTuple):
    """How a family of models writes what it thinks before it answers.

    `begin`, `end`: the markers. A prompt that ends with a begin marker starts the reply inside, one that ends with an
    end marker starts it behind; otherwise the reply starts inside if `always`, unless the client began the answer.
    `ends_before`: markers of tool calls that also end it. `anywhere`: it may begin later than at the start.
    `around`: markers around the answer, which are no text.
    `name`, `aliases` and `templates`: as in `ToolFormat`.
    """

    name: str
    aliases: tuple[str, ...] = ()
    marks: Marks = Marks(("<think>",), ("</think>",))
    always: bool = False
    ends_before: Markers = ()
    anywhere: bool = False
    around: Markers = ()
    templates: tuple[tuple[str, ...], ...] = ()

    @property
    def markers(self) -> Markers:
        return (*self.marks.begin, *self.marks.end, *self.around)

    def starts_inside(self, prompt: str, continued: bool = False) -> bool:
        """Whether the reply to this prompt starts with reasoning. `continued`: the prompt ends with a begun answer."""
        tail = prompt[-256:].rstrip()
        if tail.endswith(tuple(mark.strip() for mark in self.marks.begin)):
            return True
        return self.always and not continued and not tail.endswith(tuple(mark.strip() for mark in self.marks.end))


class ChannelFormat(NamedTuple):
    """A reply of several messages, each with a header that says what it is: OpenAI's harmony.

        start ROLE channel CHANNEL to=RECIPIENT TYPE message CONTENT end

    One row serves tools and reasoning: a message on a channel in `reasoning` is reasoning, one with a recipient in the
    name space `functions` is a call, any other is text. The recipient may stand before or behind the channel, and
    `words` are all others that a header may have. The prompt ends within the header of the first message. `frame`,
    `trigger` and `one_call`: as in `ToolFormat`.
    """

    name: str
    aliases: tuple[str, ...] = ()
    start: str = "<|start|>"
    channel: str = "<|channel|>"
    message: str = "<|message|>"
    ends: Markers = ("<|end|>", "<|call|>", "<|return|>")
    other: Markers = ("<|constrain|>",)
    reasoning: tuple[str, ...] = ("analysis",)
    functions: str = "functions."
    words: tuple[str, ...] = ("assistant", "analysis", "commentary", "final", "json", "code")
    templates: tuple[tuple[str, ...], ...] = ()
    frame: tuple[str, str] = ("", "")
    trigger: str = ""
    one_call: bool = True

    @property
    def markers(self) -> Markers:
        return (self.start, self.channel, self.message, *self.ends, *self.other)
