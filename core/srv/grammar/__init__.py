"""Structured output: grammars that the output of a request must follow. Torch-free; must not know plans or protocols.

GrammarSource (a JSON schema, a regular expression ...)  ──► GrammarBackend.translate ──► Grammar of a RequestSpec
                                                             GrammarBackend.compile  ──► one Matcher per request
"""
