"""A client of HTTP servers that several threads share."""
