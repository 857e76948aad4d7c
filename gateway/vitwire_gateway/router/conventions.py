"""Names and attributes of a request's span, by OpenTelemetry's conventions for HTTP servers and generative AI."""

from vitwire_gateway.spans import Attributes, short

VITWIRE = "vitwire"
"""`gen_ai.provider.name` of what Vitwire answers itself."""
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v2/embed": "embeddings",
}
"""`gen_ai.operation.name` by route; requests to other routes are only requests."""
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH", "QUERY"})


def name_of(method: str, path: str, model: str = "") -> str:
    """The name of a request's span; with the model if the router knows it."""
    operation = _OPERATIONS.get(path) or (method if method in _METHODS else "HTTP")
    return f"{operation} {model}" if model else operation


def attributes_of(method: str, path: str, engine: str) -> Attributes:
    """Attributes of a request's span that are known from the start."""
    known = method if method in _METHODS else "_OTHER"
    attributes = {"http.request.method": known, "url.scheme": "http", "url.path": short(path)}
    if operation := _OPERATIONS.get(path):
        attributes |= {"http.route": path, "gen_ai.operation.name": operation, "gen_ai.provider.name": engine}
    return attributes


def error_of(status: int, outcome: str) -> tuple[str, bool]:
    """The kind of error that a request ended in, empty for none, and whether it is not the caller's.

    status: of the response, 0 if none was begun. outcome: `done`, or what went wrong.
    """
    error = str(status) if outcome == "done" and status >= 400 else "" if outcome == "done" else outcome
    is_callers = 400 <= status < 500 or outcome == "client disconnected"
    return error.replace(" ", "_"), bool(error) and not is_callers
