"""What a client asks for: the fields of bodies, their checks, and one request for the engine. Must not know HTTP or
endpoints."""
