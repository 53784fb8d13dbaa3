"""How the replies of an imaginary model are written: `<hm>thoughts</hm>`, and calls as `@call NAME: {..}@end`."""

from srv.reply.rows import HeaderBody, Marks, ReasoningFormat, ToolFormat

CALLS = ToolFormat(
    "example_calls",
    call=Marks(("@call",), ("@end",)),
    bodies=(HeaderBody((":",)),),
    templates=(("@call", "@end"),),
)
THOUGHTS = ReasoningFormat("example_thoughts", marks=Marks(("<hm>",), ("</hm>",)), templates=(("<hm>",),))
