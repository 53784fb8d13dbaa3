"""The APIs: OpenAI, Anthropic, native, administration, routes of plugins; bodies, replies, and their OpenAPI document.

Must not know how a connection is read, or how the engine is reached.
"""
