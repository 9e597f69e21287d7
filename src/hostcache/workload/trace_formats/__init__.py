"""How each public trace format writes a request down: one module a format, each a reader and what it must refuse."""
